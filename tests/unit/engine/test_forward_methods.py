"""Registered steps look to Lightning like the methods that the user wrote."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_muon.engine.forward_methods import STEPS, register_steps
from tests.support.processes import ProcessPool


class _Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def training_step(self, batch: Tensor, batch_idx: int = 4, *, scale: float = 2.0) -> Any:
        """What the user says."""
        return batch.dtype, self.layer.weight.dtype, type(self.layer.weight), batch_idx, scale

    def validation_step(self, batch: Tensor) -> Tensor:
        return self.layer(batch).view(-1)

    def generate(self, x: Tensor) -> Tensor:
        return self.layer(x)


def _check_steps() -> None:
    module = _Module()
    fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    register_steps(module)
    step = module.training_step
    register_steps(module)
    assert module.training_step is step
    assert str(inspect.signature(step)) == "(batch: 'Tensor', batch_idx: 'int' = 4, *, scale: 'float' = 2.0) -> 'Any'"
    assert step.__doc__ == "What the user says."
    assert step.__wrapped__.__code__ is _Module.training_step.__code__
    assert step(torch.ones(1, 3), scale=3.0) == (torch.float32, torch.bfloat16, nn.Parameter, 4, 3.0)
    assert module.validation_step(torch.ones(1, 3).bfloat16())._base is None  # FSDP2's hooks on a view would be lost.
    module.reshard()
    assert module.generate(torch.ones(1, 3)).dtype == torch.bfloat16


def test_a_step_gathers_weights_and_keeps_its_signature(gloo: ProcessPool) -> None:
    gloo.run(_check_steps, world_size=2)


def test_the_steps_are_those_of_lightning() -> None:
    pl = pytest.importorskip("lightning.pytorch")
    assert all(callable(getattr(pl.LightningModule, name)) for name in STEPS)
