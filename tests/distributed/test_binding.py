"""What the optimizer finds out about its parameters: exchange groups, pieces, plan."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_muon.optim.binding import Binding, BoundParameter, bind, local_tensor
from lightning_muon.optim.meshes import group_by_mesh
from lightning_muon.params.routing import route_by_shape
from tests.support.processes import ProcessPool


def _bind(*tensors: torch.Tensor, mesh: Any = None) -> Binding:
    group = {"ns_steps": 5}
    parameters = [
        BoundParameter(nn.Parameter(tensor), group, route_by_shape(f"w{index}", tuple(tensor.shape)), mesh)
        for index, tensor in enumerate(tensors)
    ]
    meshes = group_by_mesh([parameter.tensor for parameter in parameters], mesh)
    return bind(parameters, meshes, itemsize=4, chunk_bytes=10**6, settings="")


def _describe(mesh_shape: tuple[int, ...]) -> list[tuple[int, bool, list[str], tuple[int, ...], list[list[int]]]]:
    mesh = init_device_mesh("cpu", mesh_shape)
    replicated = [Replicate()] * len(mesh_shape)
    binding = _bind(
        distribute_tensor(torch.ones(13, 7), mesh, [*replicated[1:], Shard(0)]),
        distribute_tensor(torch.ones(1, 9), mesh, [*replicated[1:], Shard(0)]),
        distribute_tensor(torch.ones(4, 4), mesh, replicated),
        torch.ones(5, 5),
        torch.ones(5),
    )
    return [
        (
            group.axes.size,
            group.is_replicated,
            [job.matrix.name for job in group.jobs],
            group.plan.resident,
            [[piece.numel for piece in job.pieces] for job in group.jobs],
        )
        for group in binding.exchange_groups
    ]


def test_sharded_matrices_travel_over_the_shard_axis_and_replicated_ones_over_the_mesh(gloo: ProcessPool) -> None:
    for found in gloo.run(_describe, (2, 2)):
        assert found == [
            (2, False, ["w0", "w1"], ((1,),), [[49, 42], [9, 0]]),
            (4, True, ["w2"], (), [[16] * 4]),
            (1, True, ["w3"], ((0,),), [[25]]),
        ]


def test_a_shard_axis_of_one_rank_does_not_shard(gloo: ProcessPool) -> None:
    for found in gloo.run(_describe, (2, 1), world_size=2):
        assert [(size, is_replicated) for size, is_replicated, *_ in found] == [(2, True), (1, True)]


def _overlapping() -> None:
    """Two ranks that both claim the first rows."""
    mesh = init_device_mesh("cpu", (2,))
    _bind(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]), torch.ones(3 + dist.get_rank(), 3), mesh=mesh)


def test_plain_tensors_that_are_no_replicas_are_refused(gloo: ProcessPool) -> None:
    gloo.expect_error_on_all_ranks(_overlapping, match="w1", exception=RuntimeError, world_size=2)


def test_the_local_part_shares_memory() -> None:
    tensor = torch.zeros(3)
    local_tensor(tensor).fill_(1)
    assert tensor.sum() == 3
