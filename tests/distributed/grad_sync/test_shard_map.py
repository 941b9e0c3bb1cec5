"""Who updates what (owners by cost, rows of the rest), and the parts that the ranks of a mesh hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from lightning_muon.grad_sync.shard_map import ShardMap, place_shards
from lightning_muon.params.layout import OwnedBy
from lightning_muon.params.logical import Box
from tests.support.processes import ProcessPool

SHAPES = [(13, 7), (2, 5), (), (5,), (4, 3, 2, 2), (0, 4), (1, 9), (3, 0)]


def _whole() -> list[Tensor]:
    """Values count up, so that all parts differ."""
    return [100 * index + torch.arange(torch.Size(shape).numel()).view(shape) for index, shape in enumerate(SHAPES)]


def _parts(mesh_shape: tuple[int, ...]) -> tuple[int, list[Tensor]]:
    parameters = _whole()
    placements = place_shards(parameters, {parameters[0]: 7, parameters[4]: 5, parameters[6]: 1}, mesh_shape[-1])
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    shard_map = ShardMap(mesh, placements)
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


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("highest", [1, 1000])
def test_the_least_loaded_rank_gets_the_dearest_matrix(num_ranks: int, highest: int) -> None:
    generator = torch.Generator().manual_seed(num_ranks)
    costs = torch.randint(1, highest + 1, (40,), generator=generator).tolist()
    parameters: list[Tensor] = [torch.empty(2, 2) for _ in costs]
    placements: dict[Tensor, Any] = place_shards(parameters, dict(zip(parameters, costs, strict=True)), num_ranks)
    loads = [0] * num_ranks
    for parameter, cost in zip(parameters, costs, strict=True):
        loads[placements[parameter].rank] += cost
    # Graham 1969: longest processing time first is within 4/3 - 1/(3 n) of the best, which is at least the mean.
    assert max(loads) <= (4 / 3 - 1 / (3 * num_ranks)) * max(sum(costs) / num_ranks, max(costs))
    assert highest > 1 or max(loads) - min(loads) <= 1
