"""Who updates what (owners by cost, rows of the rest), the parts of the ranks, and optimizer state saved and loaded."""

import math
from collections.abc import Sequence
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_muon.grad_sync.shard_map import ShardMap, place_shards
from lightning_muon.grad_sync.sharded_layout import ShardedLayout
from lightning_muon.params.layout import OwnedBy, PlacedState
from lightning_muon.params.logical import Box
from tests.distributed.grad_sync.reducer_setup import shard_map_of
from tests.support.processes import ProcessPool

SHAPES = [(13, 7), (2, 5), (), (5,), (4, 3, 2, 2), (0, 4), (1, 9), (3, 0)]


def _whole() -> list[Tensor]:
    """Values count up, so that all parts differ."""
    return [100 * index + torch.arange(torch.Size(shape).numel()).view(shape) for index, shape in enumerate(SHAPES)]


def _parts(mesh_shape: tuple[int, ...]) -> tuple[int, list[Tensor]]:
    parameters = _whole()
    shard_map = shard_map_of(parameters, {parameters[0]: 7, parameters[4]: 5, parameters[6]: 1}, mesh_shape)
    assert (shard_map.shard.size, shard_map.replicate is None) == (mesh_shape[-1], len(mesh_shape) == 1)
    for parameter in parameters:
        local, boxes = shard_map.local(parameter), shard_map.boxes[parameter]
        assert torch.equal(shard_map.local(parameter, parameter + 1), local + 1)
        if shard_map.is_sharded(parameter):
            # The sizes alone say where the parts are: nobody's part comes before that of a lower rank.
            filled = [(box.start[0], box.stop[0]) for box in boxes if box.numel]
            assert [0, *(stop for _, stop in filled)] == [*(start for start, _ in filled), len(parameter)]
        else:
            assert boxes == (Box((0,) * parameter.ndim, tuple(parameter.shape)),) * shard_map.shard.size
        local += 1000
        assert (parameter >= 1000).sum() == local.numel(), "shares memory"
        local -= 1000
    return shard_map.shard.rank, [shard_map.local(parameter) for parameter in parameters]


@pytest.mark.parametrize("mesh_shape", [(1,), (3,), (2, 2)], ids=str)
def test_parts_share_memory_and_make_up_the_parameters(gloo: ProcessPool, mesh_shape: tuple[int, ...]) -> None:
    num_ranks = mesh_shape[-1]
    results = gloo.run(_parts, mesh_shape, world_size=int(torch.tensor(mesh_shape).prod()))
    assert [rank for rank, _ in results] == list(range(num_ranks)) * (len(results) // num_ranks)
    owned = {0: 0, 4: 1 % num_ranks, 6: 2 % num_ranks if num_ranks != 2 else 1}
    for rank, parts in results:
        for index, (whole, part) in enumerate(zip(_whole(), parts, strict=True)):
            if index in owned:
                expected = whole if owned[index] == rank else torch.empty((0,) * whole.ndim)
            elif whole.ndim == 0 or whole.numel() == 0:
                expected = whole
            else:
                chunks = whole.chunk(num_ranks)
                expected = chunks[rank] if rank < len(chunks) else whole[:0]
            assert part.shape == expected.shape
            assert part.tolist() == expected.tolist()


def test_matrices_have_owners_and_the_rest_rows() -> None:
    parameters = [torch.empty(shape) for shape in ((4, 4), (4,), (), (0, 3), (7, 5), (1, 2))]
    costs = {parameters[0]: 100, parameters[2]: 5, parameters[3]: 5, parameters[4]: 90}
    placements = place_shards(parameters, costs, 3)
    assert list(placements) == parameters
    assert list(placements.values()) == [OwnedBy(0), Shard(0), Replicate(), Replicate(), OwnedBy(1), Shard(0)]


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


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def _layout(shard_map: ShardMap) -> ShardedLayout:
    return ShardedLayout(shard_map, *[mock.Mock()] * 3)


def _placed(parameters: Sequence[Tensor], states: Sequence[Tensor]) -> list[PlacedState]:
    pairs = zip(parameters, states, strict=True)
    return [PlacedState(parameter, state, tuple(parameter.shape)) for parameter, state in pairs]


def _round_trip(mesh_shape: tuple[int, ...]) -> None:
    parameters, shard_map = _shard_map(mesh_shape)
    doubled, full, local = _state(parameters, shard_map)
    layout = _layout(shard_map)
    rows = layout.saved(_placed(doubled, local))
    back = layout.loaded(_placed(doubled, rows))
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
