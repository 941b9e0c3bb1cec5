"""``lightning-muon plan`` and the optimizer decide alike."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_muon.cli.plan_model import Mesh
from lightning_muon.cli.plan_step import IN_REPLICAS, ON_ALL, Setting, planned_steps
from lightning_muon.config import MuonConfig
from lightning_muon.params.shapes import ModelShapes, ParameterShape
from lightning_muon.schedule.cost import PRESETS
from tests.support.processes import ProcessPool
from tests.support.step_plans import plan_for


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
        ([each.owner for each in found.matrices], [each.held for each in found.matrices])
        for found in (outcome.plan, group)
    ]


@pytest.mark.parametrize("dedupe", ["always", "never"])
def test_the_plan_command_finds_the_owners_of_the_optimizer(gloo: ProcessPool, dedupe: str) -> None:
    for found in gloo.run(_planned_and_bound, dedupe, world_size=4):
        planned, bound = found
        assert planned == bound
