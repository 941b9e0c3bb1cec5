"""Models for the tests of sharding, and their gradients in one process."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from lightning_muon.sharding.base import ModeOptions
from lightning_muon.sharding.fsdp import Fsdp


class Block(nn.Module):
    """Odd sizes: no dimension divides evenly, the norm has fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 13)
        self.norm = nn.LayerNorm(13)
        self.gain = nn.Parameter(torch.ones(1))
        self.down = nn.Linear(13, 7, bias=False)
        self.down.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.norm(self.up(x))))


class Net(nn.Module):
    """Tied table and head, blocks, a 0-d parameter, a buffer; entered by ``training_step``."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("offset", torch.rand(7))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens) + self.offset
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) * self.scale

    def training_step(self, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(tokens).flatten(0, 1), tokens.flatten())

    def generate(self, tokens: Tensor) -> Tensor:
        return self.blocks[0](self.table(tokens))


def attach_fsdp(model: nn.Module, mesh: DeviceMesh, **options: Any) -> Fsdp:
    """Shard it, with its methods beside ``forward`` as entries, and compare the ranks at the end of each backward."""
    mode = Fsdp(mesh, ModeOptions(**options))
    mode.prepare(model)
    for name in ("training_step", "generate"):
        if hasattr(model, name):
            register_fsdp_forward_method(model, name)
    mode.attach(model, [torch.optim.SGD(model.parameters())])
    return mode


def make_mesh(shape: tuple[int, int]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def tokens_of_all(world_size: int) -> Tensor:
    return torch.randint(0, 11, (world_size, 2, 5), generator=torch.Generator().manual_seed(1))


def full(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: full(parameter.grad) for name, parameter in model.named_parameters()}


def assert_close(actual: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert actual[name] is None, name
        else:
            # The mean over ranks is summed in another order than the mean over the whole batch: a few ulp of fp32.
            torch.testing.assert_close(
                actual[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
            )
