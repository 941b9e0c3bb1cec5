"""The parts of parameters that the ranks of a mesh hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightning_muon.grad_sync.shard_map import ShardMap, place_shards
from tests.support.processes import ProcessPool

MESHES = [(1,), (3,), (2, 2)]
SHAPES = [(13, 7), (2, 5), (), (5,), (4, 3, 2, 2), (0, 4), (1, 9), (3, 0)]


def _make(mesh_shape: tuple[int, ...]) -> tuple[list[Tensor], ShardMap]:
    """Every second parameter that has a cost is owned; values count up, so that all parts differ."""
    parameters = [
        100 * index + torch.arange(torch.Size(shape).numel()).view(shape) for index, shape in enumerate(SHAPES)
    ]
    placements = place_shards(parameters, {parameters[0]: 7, parameters[4]: 5, parameters[6]: 1}, mesh_shape[-1])
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    return parameters, ShardMap(mesh, placements)


def _parts(mesh_shape: tuple[int, ...]) -> tuple[int, list[Tensor]]:
    parameters, shard_map = _make(mesh_shape)
    assert (shard_map.shard.size, shard_map.replicate is None) == (mesh_shape[-1], len(mesh_shape) == 1)
    for parameter in parameters:
        local, ranges = shard_map.local(parameter), shard_map.ranges[parameter]
        start, stop = ranges[shard_map.shard.rank]
        assert torch.equal(local.reshape(-1), parameter.reshape(-1)[start:stop])
        assert torch.equal(shard_map.local(parameter, parameter + 1), local + 1)
        if shard_map.is_sharded(parameter):
            # The sizes alone say where the parts are: nobody's part comes before that of a lower rank.
            filled = [bounds for bounds in ranges if bounds[0] < bounds[1]]
            assert [0, *(stop for _, stop in filled)] == [*(start for start, _ in filled), parameter.numel()]
        else:
            assert ranges == [(0, parameter.numel())] * shard_map.shard.size
        local += 1000
        assert (parameter.view(-1)[start:stop] >= 1000).all(), "shares memory"
        local -= 1000
    return shard_map.shard.rank, [shard_map.local(parameter) for parameter in parameters]


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_parts_share_memory_and_make_up_the_parameters(gloo: ProcessPool, mesh_shape: tuple[int, ...]) -> None:
    num_ranks = mesh_shape[-1]
    results = gloo.run(_parts, mesh_shape, world_size=int(torch.tensor(mesh_shape).prod()))
    assert [rank for rank, _ in results] == list(range(num_ranks)) * (len(results) // num_ranks)
    owned = {0: 0, 4: 1 % num_ranks, 6: 2 % num_ranks if num_ranks != 2 else 1}
    for rank, parts in results:
        for index, (shape, part) in enumerate(zip(SHAPES, parts, strict=True)):
            whole = 100 * index + torch.arange(torch.Size(shape).numel()).view(shape)
            if index in owned:
                expected = whole if owned[index] == rank else torch.empty((0,) * len(shape))
            elif whole.ndim == 0 or whole.numel() == 0:
                expected = whole
            else:
                chunks = whole.chunk(num_ranks)
                expected = chunks[rank] if rank < len(chunks) else whole[:0]
            assert part.shape == expected.shape
            assert part.tolist() == expected.tolist()
