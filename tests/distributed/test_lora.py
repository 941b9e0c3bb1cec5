"""The factors of LoRA on Muon and AdamW, in shards of FSDP2, against one process."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from typing_extensions import override

from lightning_muon import ParallelMuon
from lightning_muon.config import Lora
from tests.distributed.sharding.training import mesh_of
from tests.reference.muon_and_adamw import MuonAndAdamW
from tests.support.processes import ProcessPool
from tests.support.tensors import weights_of

RANK = 3


class LoRALinear(nn.Module):
    """The names and the start of PEFT, with DoRA's magnitudes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base_layer = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, RANK, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(RANK, outputs, bias=False)})
        self.lora_magnitude_vector = nn.ParameterDict({"default": nn.Parameter(torch.rand(outputs) + 0.5)})
        nn.init.zeros_(self.lora_B["default"].weight)  # type: ignore[arg-type]

    @override
    def forward(self, x: Tensor) -> Tensor:
        changed = self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))
        return self.lora_magnitude_vector["default"] * changed


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(LoRALinear(13, 7), nn.GELU(), LoRALinear(7, 13))


def _loss(model: nn.Module, step: int) -> Tensor:
    return model(torch.randn(8, 13, generator=torch.Generator().manual_seed(step))).square().mean()


def _train(mesh_shape: tuple[int, ...], lora: Lora) -> dict[str, Tensor]:
    model = _model()
    fully_shard(model, mesh=mesh_of(mesh_shape))
    optimizer = ParallelMuon(model, lr=0.01, lora=lora, compute_dtype="float32", wire_dtype="float32")
    for step in range(4):
        _loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (3,), (2, 2), (4,)], ids=str)
def test_both_rules_are_those_of_one_process(gloo: ProcessPool, mesh_shape: tuple[int, ...]) -> None:
    rules: dict[Lora, str] = {"both": "AB", "b_only": "B"}
    for lora, on_muon in rules.items():
        model = _model()
        names = [f"{layer}.lora_{factor}.default.weight" for layer in (0, 2) for factor in on_muon]
        reference = MuonAndAdamW(model, names, lr=0.01)
        for step in range(4):
            _loss(model, step).backward()
            reference.step()
            model.zero_grad()
        for found in gloo.run(_train, mesh_shape, lora, world_size=math.prod(mesh_shape)):
            for name, expected in weights_of(model).items():
                # AdamW divides by moments of gradients that are near zero, since B begins with zeros.
                torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=2e-5, msg=name)
