"""The running part of the strategy, seen from Lightning; whole runs are in tests/integration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_muon.engine.gradient_rules import GradientRules
from lightning_muon.sharding.mode import ModeOptions
from lightning_muon.sharding.modes import make_mode
from tests.integration.training import PACKAGES, load, strategy_class
from tests.support.processes import ProcessPool


class _Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        return self.layer(x)

    def validation_step(self, x: Any) -> Any:
        return self(x)


def _facts(package: str) -> list[Any]:
    load(package)
    strategy = strategy_class(package)()
    module = _Steps()
    strategy._mode = make_mode("fsdp", init_device_mesh("cpu", (dist.get_world_size(),)), ModeOptions())
    strategy._mode.prepare(module)
    strategy._mode.attach(module, [])
    strategy._rules = GradientRules(module, strategy._mode, clip_groups="all", max_skipped_steps=3)
    strategy._lightning_module = module
    strategy.model = module
    x, facts = torch.ones(1, 2), []
    strategy.validation_step(x)
    facts.append(isinstance(module.layer.weight, DTensor))
    with strategy.block_backward_sync():
        module(x).sum().backward()
    module.reshard()
    facts.append(module.layer.weight.grad is None)
    module(x).sum().backward()
    facts.append(module.layer.weight.grad.full_tensor().tolist())
    return facts


@pytest.mark.parametrize("package", PACKAGES)
def test_weights_are_freed_after_evaluation_and_gradients_wait_for_the_last_micro_batch(
    gloo: ProcessPool, package: str
) -> None:
    assert gloo.run(_facts, package, world_size=2)[0] == [True, True, [[2.0, 2.0], [2.0, 2.0]]]
