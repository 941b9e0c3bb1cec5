"""Memory for meta tensors, and steps that look to Lightning like the methods that the user wrote."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_muon.engine.model_setup import MetaTensors, has_meta_tensors, register_steps
from tests.support.processes import ProcessPool


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(4)
        self.raw = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool), persistent=False)
        self.register_buffer("count", torch.ones(2, dtype=torch.long))
        self.scale = torch.ones(2)  # Neither parameter nor buffer.


class _Own(_Net):
    """Initializes what is in it, as models of transformers and of nanoGPT do."""

    def _init_weights(self, module: nn.Module) -> None:
        if module is self:
            self.raw.data.fill_(4.0)
            self.scale.fill_(2.0)
            nn.init.zeros_(self.norm.weight)
            self.mask.fill_(True)
            self.count = torch.zeros(2, dtype=torch.long)
        elif isinstance(module, nn.Embedding):
            nn.init.ones_(module.weight)


_CPU = torch.device("cpu")


def _on_meta(kind: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    with torch.device("meta"):
        return kind()


def test_ties_flags_persistence_and_values_are_right() -> None:
    module = _on_meta(_Net)
    before = module.state_dict().keys()
    meta = MetaTensors(module, _CPU)
    meta.initialize(module.head)
    assert has_meta_tensors(module)
    meta.initialize(module)  # Ties between calls survive.
    assert meta.left == [("raw", True), ("mask", False), ("count", True), ("scale", False)]
    with pytest.raises(ValueError, match=r"mask, scale: nothing initializes .* is in no checkpoint; give"):
        meta.require_saved()
    assert module.count.tolist() == [torch.iinfo(torch.long).min] * 2, "as an index it fails"
    assert not has_meta_tensors(module) and module.state_dict().keys() == before
    assert module.head.weight is module.embedding.weight and not module.raw.requires_grad
    assert module.embedding.weight.abs().max() > 1, "normal, as its first holder makes it, not uniform in +- 1/2"
    assert module.raw.isnan().all(), "what cannot initialize itself"
    assert torch.equal(module.norm.running_var, torch.ones(4))


def test_the_model_around_a_module_has_the_last_word() -> None:
    module = nn.Sequential(_on_meta(_Own), nn.Linear(2, 2))
    before = module[1].weight.clone()
    meta = MetaTensors(module, _CPU)
    meta.initialize(module)
    assert meta.left == [] and not has_meta_tensors(module)
    assert module[0].raw.tolist() == [4] * 3 and module[0].mask.all() and module[0].embedding.weight.eq(1).all()
    assert module[0].norm.weight.eq(0).all() and module[0].scale.eq(2).all()
    assert torch.equal(module[1].weight, before), "real tensors are left alone"


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
