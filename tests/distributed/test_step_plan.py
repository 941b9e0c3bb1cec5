"""What the optimizer finds out about its parameters: exchange groups, pieces, plan."""

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_muon.cli.plan_model import Mesh
from lightning_muon.cli.plan_step import IN_REPLICAS, ON_ALL, Setting, planned_steps
from lightning_muon.config import MuonConfig
from lightning_muon.optim import step_plan as plan_module
from lightning_muon.schedule.cost import PRESETS
from lightning_muon.schedule.estimates import machine_of
from lightning_muon.schedule.shapes import ModelShapes, ParameterShape
from tests.support.processes import ProcessPool
from tests.support.step_plans import plan_for

Description = list[tuple[int, tuple[int, ...], list[str], list[list[int]]]]


def _describe(mesh_shape: tuple[int, ...], dedupe: str) -> Description:
    mesh = init_device_mesh("cpu", mesh_shape)
    replicated = [Replicate()] * len(mesh_shape)
    tensors = [
        distribute_tensor(torch.ones(13, 7), mesh, [*replicated[1:], Shard(0)]),
        distribute_tensor(torch.ones(1, 9), mesh, [*replicated[1:], Shard(0)]),
        distribute_tensor(torch.ones(4, 4), mesh, replicated),
        torch.ones(5, 5),
        torch.ones(5),
    ]
    return [
        (
            group.axes.size,
            group.replica_of,
            [job.matrix.name for job in group.jobs],
            [list(job.pieces.on_ranks.held) for job in group.jobs],
        )
        for group in plan_for(tensors, dedupe=dedupe).exchange_groups
    ]


def test_where_matrices_travel_depends_on_sharing(gloo: ProcessPool) -> None:
    for found in gloo.run(_describe, (2, 2), "always"):
        assert found == [
            (1, (0,), ["w3"], [[25]]),
            (4, (0, 0, 1, 1), ["w0", "w1"], [[49, 42] * 2, [9, 0] * 2]),
            (4, (0, 1, 2, 3), ["w2"], [[16] * 4]),
        ]
    for found in gloo.run(_describe, (2, 2), "never"):
        assert found == [
            (2, (0, 0), ["w0", "w1"], [[49, 42], [9, 0]]),
            (1, (0,), ["w2"], [[16]]),
            (1, (0,), ["w3"], [[25]]),
        ]
    # On a CPU the 4 x 4 and the 13 x 7 matrix are faster computed than sent.
    for found in gloo.run(_describe, (2, 2), "auto"):
        assert [size for size, *_ in found] == [2, 1, 1]
    # A shard axis of one rank does not shard.
    for found in gloo.run(_describe, (2, 1), "always", world_size=2):
        assert [(size, replica_of) for size, replica_of, *_ in found] == [(1, (0,)), (2, (0, 1))]


def _plain_that_differ() -> None:
    mesh = init_device_mesh("cpu", (2,))
    plan_for([distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]), torch.ones(3 + dist.get_rank(), 3)], mesh)


def test_plain_tensors_that_are_no_replicas_are_refused(gloo: ProcessPool) -> None:
    gloo.expect_error_on_all_ranks(_plain_that_differ, match="w1", exception=RuntimeError, world_size=2)


def _links(hosts: str, dedupe: str, variable: str) -> list[tuple[bool, bool]]:
    """What the planner takes the links of each exchange group for, if the ranks are on machines of these names."""
    host = hosts[dist.get_rank()]
    mesh = init_device_mesh("cpu", (2, 2))
    with (
        # Machines may have the same name; torchrun then tells them apart.
        mock.patch("socket.gethostname", return_value="localhost" if variable else host),
        mock.patch.dict(os.environ, {variable: host} if variable else {}),
        mock.patch.object(plan_module, "machine_of", side_effect=machine_of) as asked,
    ):
        weight = distribute_tensor(torch.ones(13, 7), mesh, [Replicate(), Shard(0)])
        plan_for([torch.ones(5, 5), weight], dedupe=dedupe, overlap="auto")
    return [call.kwargs["is_between_machines"] for call in asked.call_args_list]


@pytest.mark.parametrize(
    ("hosts", "dedupe", "expected", "variable"),
    [
        ("aaaa", "always", (False, False), ""),
        # A machine for each replica.
        ("aabb", "always", (False, True), ""),
        ("aabb", "always", (False, True), "GROUP_RANK"),
        ("aabb", "never", (False, False), "GROUP_RANK"),
        ("abab", "never", (True, True), ""),
        # Also the ranks whose own links are fast have to decide by the slowest.
        ("aaab", "never", (True, True), ""),
        ("aaab", "always", (True, True), "GROUP_RANK"),
    ],
)
def test_all_ranks_decide_by_the_slowest_links_of_the_mesh(
    gloo: ProcessPool, hosts: str, dedupe: str, expected: tuple[bool, bool], variable: str
) -> None:
    alone = (False, False)
    assert gloo.run(_links, hosts, dedupe, variable, world_size=4) == [[alone, expected]] * 4


def _estimates() -> list[Any]:
    """Of matrices that are cut into uneven shards and have different owners."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = [distribute_tensor(torch.ones(rows, 7), mesh, [Shard(0)]) for rows in (13, 29, 2)]
    return [group.estimate for group in plan_for(weights, overlap="auto").exchange_groups]


def test_ranks_with_different_shards_and_matrices_decide_alike(gloo: ProcessPool) -> None:
    first, *others = gloo.run(_estimates, world_size=3)
    assert first != [None]
    assert others == [first] * 2


def _planned_and_bound(dedupe: str) -> list[tuple[object, object]]:
    """Owners that ``lightning-muon plan`` finds from shapes, beside those of the optimizer on the same mesh."""
    shapes = [(13, 7), (64, 32), (1, 9), (6, 6)]
    mesh = init_device_mesh("cpu", (2, 2))
    weights = [distribute_tensor(torch.ones(shape), mesh, [Replicate(), Shard(0)]) for shape in shapes]
    (group,) = plan_for(weights, dedupe=dedupe).exchange_groups
    parameters = [ParameterShape(name=f"w{i}", shape=shape, kind="matrix") for i, shape in enumerate(shapes)]
    model, config = (
        ModelShapes(name="m", source="", parameters=tuple(parameters)),
        MuonConfig(chunk_bytes=10**6, wire_dtype="float32"),
    )
    steps = planned_steps(Setting(model=model, config=config, cost=PRESETS["reference"]), Mesh(replicate=2, shard=2))
    outcome = steps[ON_ALL if dedupe == "always" else IN_REPLICAS]
    held = [spec.shards.held for spec in outcome.specs]
    return [(outcome.plan.owners, group.plan.owners), (held, [job.pieces.on_ranks.held for job in group.jobs])]


@pytest.mark.parametrize("dedupe", ["always", "never"])
def test_the_plan_command_finds_the_owners_of_the_optimizer(gloo: ProcessPool, dedupe: str) -> None:
    for found in gloo.run(_planned_and_bound, dedupe, world_size=4):
        for planned, bound in found:
            assert planned == bound
