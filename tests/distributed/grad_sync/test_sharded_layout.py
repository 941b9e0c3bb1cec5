"""Optimizer state on owners and by rows, saved and loaded."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_muon.grad_sync.shard_map import ShardMap, place_shards
from lightning_muon.grad_sync.sharded_layout import ShardedLayout
from tests.support.processes import ProcessPool

SHAPES = [(13, 7), (2, 5), (), (5,), (4, 3, 2, 2), (0, 4), (1, 9), (3, 0), (8, 8), (17, 3)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int32]


def _shard_map(mesh_shape: tuple[int, ...]) -> tuple[list[Tensor], ShardMap]:
    """Parameters of all shapes; those of several dimensions and one vector are owned whole."""
    parameters = [torch.empty(shape) for shape in SHAPES]
    whole = {parameter: max(parameter.numel(), 1) for parameter in parameters if parameter.ndim != 0}
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    return parameters, ShardMap(mesh, place_shards(parameters, whole, mesh_shape[-1]))


def _state(parameters: list[Tensor], shard_map: ShardMap) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Two states for each parameter in a mix of dtypes: parameters, whole values, and the parts of this rank."""
    generator = torch.Generator().manual_seed(3)
    doubled = [parameter for parameter in parameters for _ in range(2)]
    full = [
        (torch.randn(parameter.shape, generator=generator) * 1000).to(DTYPES[index % 4])
        for index, parameter in enumerate(doubled)
    ]
    local = [shard_map.local(parameter, whole).clone() for parameter, whole in zip(doubled, full, strict=True)]
    return doubled, full, local


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def _layout(shard_map: ShardMap) -> ShardedLayout:
    return ShardedLayout(shard_map, *[mock.Mock()] * 3)


def _round_trip(mesh_shape: tuple[int, ...]) -> None:
    parameters, shard_map = _shard_map(mesh_shape)
    doubled, full, local = _state(parameters, shard_map)
    layout = _layout(shard_map)
    rows = layout.saved(list(zip(doubled, local, strict=True)))
    back = layout.loaded(list(zip(doubled, rows, strict=True)))
    for parameter, tensor, whole in zip(doubled, rows, full, strict=True):
        if not shard_map.is_sharded(parameter):
            assert _same_bits(tensor, whole)
            continue
        expected = distribute_tensor(whole, shard_map.mesh, [Replicate()] * (len(mesh_shape) - 1) + [Shard(0)])
        assert isinstance(tensor, DTensor)
        assert tensor.placements == expected.placements
        assert tensor.shape == expected.shape
        assert tensor.stride() == expected.stride()
        assert _same_bits(tensor.to_local(), expected.to_local())
        assert _same_bits(tensor.full_tensor(), whole)
        # No result keeps the memory of an exchange.
        assert tensor.to_local().untyped_storage().nbytes() == tensor.to_local().nbytes
    for one, other in zip(back, local, strict=True):
        assert _same_bits(one, other) and one.untyped_storage().nbytes() == one.nbytes


@pytest.mark.parametrize("mesh_shape", [(1,), (3,), (4,), (2, 2)], ids=str)
def test_rows_are_the_chunks_of_torch_bit_for_bit(gloo: ProcessPool, mesh_shape: tuple[int, ...]) -> None:
    gloo.run(_round_trip, mesh_shape, world_size=math.prod(mesh_shape))


def _wrong_on_one_rank(kind: str) -> None:
    parameters, shard_map = _shard_map((dist.get_world_size(),))
    doubled, full, local = _state(parameters, shard_map)
    layout = _layout(shard_map)
    is_wrong = dist.get_rank() == 1
    if is_wrong and kind == "dtype":
        local[0] = local[0].double()
    rows = layout.saved(list(zip(doubled, local, strict=True)))
    if is_wrong and kind == "plain":
        rows[0] = full[0]
    if is_wrong and kind == "replicated":
        rows[0] = DTensor.from_local(full[0], shard_map.mesh, [Replicate()], run_check=False)
    layout.loaded(list(zip(doubled, rows, strict=True)))


@pytest.mark.parametrize(
    ("kind", "match"),
    [("dtype", "tensor 0.*float64"), ("plain", "tensor 0"), ("replicated", r"\(13, 7\) is laid out as .*Replicate")],
)
def test_what_one_rank_does_wrong_stops_all_ranks(gloo: ProcessPool, kind: str, match: str) -> None:
    with pytest.raises(Exception, match=match) as failed:
        gloo.run(_wrong_on_one_rank, kind, world_size=3, grace=20.0)
    assert sorted(failed.value.failures) == [0, 1, 2]  # type: ignore[attr-defined]
