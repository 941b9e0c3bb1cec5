"""What the optimizer finds out about its parameters: exchange groups, pieces, plan."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_muon.cli.plan_model import Mesh
from lightning_muon.cli.plan_step import IN_REPLICAS, ON_ALL, Setting, planned_steps
from lightning_muon.config import MuonConfig
from lightning_muon.params.shapes import ModelShapes, ParameterShape
from lightning_muon.schedule.cost import PRESETS
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
            [matrix.name for matrix in group.matrices],
            [[count for replica in matrix.held.values() for count in replica.values()] for matrix in group.matrices],
        )
        for group in plan_for(tensors, dedupe=dedupe).exchange_groups
    ]


def test_where_matrices_travel_depends_on_sharing(gloo: ProcessPool) -> None:
    for found in gloo.run(_describe, (2, 2), "always"):
        assert found == [
            (1, (0,), ["w3"], [[25]]),
            (4, (0, 0, 1, 1), ["w0", "w1"], [[49, 42] * 2, [9] * 2]),
            (4, (0, 1, 2, 3), ["w2"], [[16] * 4]),
        ]
    for found in gloo.run(_describe, (2, 2), "never"):
        assert found == [
            (2, (0, 0), ["w0", "w1"], [[49, 42], [9]]),
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


def _orders_that_differ() -> None:
    """Between two exchange groups over the same ranks, each rank has another number of matrices of its own."""
    mesh = init_device_mesh("cpu", (2, 2))
    tensors = [distribute_tensor(torch.ones(4, 4), mesh, [each, Shard(1)]) for each in (Shard(0), Replicate())]
    own = [torch.ones(4, 4) for _ in range(1 + 3 * dist.get_rank())]
    plan_for([*tensors, *own], bucket_bytes=1, look_ahead=3)


def test_an_order_of_messages_that_differs_is_refused(gloo: ProcessPool) -> None:
    gloo.expect_error_on_all_ranks(
        _orders_that_differ, match="the plan of ParallelMuon differs", exception=RuntimeError
    )


def _planned_and_bound(dedupe: str) -> list[object]:
    """Owners that ``lightning-muon plan`` finds from shapes, beside those of the optimizer on the same mesh."""
    shapes = [(13, 7), (64, 32), (1, 9), (6, 6)]
    mesh = init_device_mesh("cpu", (2, 2))
    weights = [distribute_tensor(torch.ones(shape), mesh, [Replicate(), Shard(0)]) for shape in shapes]
    (group,) = plan_for(weights, dedupe=dedupe).exchange_groups
    parameters = [ParameterShape(name=f"w{i}", shape=shape, kind="matrix") for i, shape in enumerate(shapes)]
    model, config = (
        ModelShapes(name="m", source="", parameters=tuple(parameters)),
        MuonConfig(bucket_bytes=10**6, wire_dtype="float32"),
    )
    steps = planned_steps(Setting(model=model, config=config, cost=PRESETS["reference"]), Mesh(replicate=2, shard=2))
    outcome = steps[ON_ALL if dedupe == "always" else IN_REPLICAS]
    return [
        ([each.owners for each in found.matrices], [each.held for each in found.matrices])
        for found in (outcome.plan, group)
    ]


@pytest.mark.parametrize("dedupe", ["always", "never"])
def test_the_plan_command_finds_the_owners_of_the_optimizer(gloo: ProcessPool, dedupe: str) -> None:
    for found in gloo.run(_planned_and_bound, dedupe, world_size=4):
        planned, bound = found
        assert planned == bound
