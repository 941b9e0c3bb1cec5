"""``lightning-muon plan`` and the optimizer decide alike."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_muon import MuonConfig, ParallelMuon
from lightning_muon.cli.plan_model import Mesh
from lightning_muon.cli.plan_step import IN_REPLICAS, ON_ALL, Setting, planned_steps
from lightning_muon.params.shapes import ModelShapes, ParameterShape
from lightning_muon.schedule.cost import PRESETS
from tests.distributed.sharding.training import mesh_of
from tests.support.processes import ProcessPool

SHAPES = [(13, 7), (64, 32), (1, 9), (6, 6)]


def _planned_and_bound(dedupe: Any) -> list[object]:
    """Owners that ``lightning-muon plan`` finds from shapes, beside those of the optimizer on the same mesh."""
    config, mesh = MuonConfig(dedupe=dedupe, wire_dtype="float32", compute_dtype="float32"), mesh_of((2, 2))
    weights = [nn.Parameter(distribute_tensor(torch.ones(each), mesh, [Replicate(), Shard(0)])) for each in SHAPES]
    (group,) = ParallelMuon(weights, **vars(config))._make_plan().plan.exchange_groups
    parameters = [ParameterShape(name=f"w{i}", shape=shape, kind="matrix") for i, shape in enumerate(SHAPES)]
    model = ModelShapes(name="m", source="", parameters=tuple(parameters))
    steps = planned_steps(Setting(model=model, config=config, cost=PRESETS["reference"]), Mesh(replicate=2, shard=2))
    planned = steps[ON_ALL if dedupe == "always" else IN_REPLICAS].plan
    return [[(each.owner, each.held) for each in found.matrices] for found in (planned, group)]


@pytest.mark.parametrize("dedupe", ["always", "never"])
def test_the_plan_command_finds_the_owners_of_the_optimizer(gloo: ProcessPool, dedupe: str) -> None:
    for planned, bound in gloo.run(_planned_and_bound, dedupe, world_size=4):
        assert planned == bound
