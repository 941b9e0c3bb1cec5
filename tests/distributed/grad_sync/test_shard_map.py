"""Optimizer state that one rank saves or loads wrongly is an error on all ranks."""

from collections.abc import Sequence
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from lightning_muon.grad_sync.shard_map import ShardMap
from lightning_muon.grad_sync.sharded_layout import ShardedLayout
from lightning_muon.params.layout import PlacedState
from tests.distributed.grad_sync.reducer_setup import shard_map_of
from tests.support.processes import ProcessPool

STATE_SHAPES = [(13, 7), (2, 5), (), (5,), (4, 3, 2, 2), (0, 4), (1, 9), (3, 0), (8, 8), (17, 3)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int32]


def _shard_map(mesh_shape: tuple[int, ...]) -> tuple[list[Tensor], ShardMap]:
    """Parameters of all shapes; those of several dimensions and one vector are owned whole."""
    parameters = [torch.empty(shape) for shape in STATE_SHAPES]
    whole = {parameter: max(parameter.numel(), 1) for parameter in parameters if parameter.ndim != 0}
    return parameters, shard_map_of(parameters, whole, mesh_shape)


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


def _layout(shard_map: ShardMap) -> ShardedLayout:
    return ShardedLayout(shard_map, *[mock.Mock()] * 2)


def _placed(parameters: Sequence[Tensor], states: Sequence[Tensor]) -> list[PlacedState]:
    pairs = zip(parameters, states, strict=True)
    return [PlacedState(parameter, state, tuple(parameter.shape)) for parameter, state in pairs]


def _wrong_on_one_rank(kind: str) -> None:
    parameters, shard_map = _shard_map((dist.get_world_size(),))
    doubled, full, local = _state(parameters, shard_map)
    layout = _layout(shard_map)
    is_wrong = dist.get_rank() == 1
    if is_wrong and kind == "dtype":
        local[0] = local[0].double()
    rows = layout.saved(_placed(doubled, local))
    if is_wrong and kind == "plain":
        rows[0] = full[0]
    if is_wrong and kind == "replicated":
        rows[0] = DTensor.from_local(full[0], shard_map.mesh, [Replicate()], run_check=False)
    layout.loaded(_placed(doubled, rows))


@pytest.mark.parametrize(
    ("kind", "match"),
    [("dtype", "tensor 0.*float64"), ("plain", "tensor 0"), ("replicated", r"\(13, 7\) is laid out as .*Replicate")],
)
def test_what_one_rank_does_wrong_stops_all_ranks(gloo: ProcessPool, kind: str, match: str) -> None:
    with pytest.raises(Exception, match=match) as failed:
        gloo.run(_wrong_on_one_rank, kind, world_size=3, grace=20.0)
    assert sorted(failed.value.failures) == [0, 1, 2]  # type: ignore[attr-defined]
