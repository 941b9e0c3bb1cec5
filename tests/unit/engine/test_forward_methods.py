"""Registered steps look to Lightning like the methods that the user wrote."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

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

    def generate(self, x: Tensor) -> Tensor:
        return self.layer(x)


def _facts() -> dict[str, Any]:
    module = _Module()
    fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    register_steps(module)
    once = module.training_step
    register_steps(module)
    batch_dtype, weight_dtype, kind, index, scale = module.training_step(torch.ones(1, 3), scale=3.0)
    module.reshard()
    return {
        "once": module.training_step is once,
        "signature": str(inspect.signature(module.training_step)),
        "doc": module.training_step.__doc__,
        "code": module.training_step.__wrapped__.__code__ is _Module.training_step.__code__,
        "batch": batch_dtype,
        "weight": weight_dtype,
        "whole": kind is nn.Parameter,
        "arguments": (index, scale),
        "generate": module.generate(torch.ones(1, 3)).dtype,
        "sharded": isinstance(module, FSDPModule),
    }


def test_a_step_gathers_weights_and_keeps_its_signature(gloo: ProcessPool) -> None:
    facts = gloo.run(_facts, world_size=2)[0]
    assert facts == {
        "once": True,
        "signature": "(batch: 'Tensor', batch_idx: 'int' = 4, *, scale: 'float' = 2.0) -> 'Any'",
        "doc": "What the user says.",
        "code": True,
        "batch": torch.float32,
        "weight": torch.bfloat16,
        "whole": True,
        "arguments": (4, 3.0),
        "generate": torch.bfloat16,
        "sharded": True,
    }


def test_the_steps_are_those_of_lightning() -> None:
    pl = pytest.importorskip("lightning.pytorch")
    assert all(callable(getattr(pl.LightningModule, name)) for name in STEPS)
