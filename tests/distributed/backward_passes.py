"""A sharded model, and backward passes with what users do to gradients, state and options before a step."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_muon import ParallelMuon
from tests.distributed.sharding.training import mesh_of


class Net(nn.Module):
    """Odd shapes, a tied weight, a frozen one, and a branch that not every call takes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 13)
        self.first = nn.Linear(13, 7)
        self.second = nn.Linear(7, 13, bias=False)
        self.branch = nn.Linear(13, 13)
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.last = nn.Linear(13, 3)
        self.head = nn.Linear(3, 11)

    def forward(self, tokens: Tensor, *, branch: bool = True) -> Tensor:
        x = self.embed(tokens)
        x = self.second(torch.tanh(self.first(x))) + self.frozen(x)
        x = self.second(torch.tanh(self.first(x)))
        if branch:
            x = self.branch(x)
        return self.head(self.last(torch.tanh(x)))


def sharded(mesh_shape: tuple[int, ...]) -> Net:
    torch.manual_seed(0)
    model = Net()
    mesh = mesh_of(mesh_shape)
    for unit in (model.first, model.second, model.branch, model.last):
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for unit in model.modules():
        if isinstance(unit, FSDPModule) and hasattr(unit, "set_reduce_scatter_unused_params"):
            unit.set_reduce_scatter_unused_params(True, recurse=False)
    return model


def make_optimizer(model: nn.Module, **options: Any) -> ParallelMuon:
    float32 = {"compute_dtype": "float32", "wire_dtype": "float32"}
    options = {"lr": 0.02, **float32, "bucket_bytes": 1} | options
    return ParallelMuon(model, **options)


def tokens(step: int) -> Tensor:
    return torch.randint(11, (5,), generator=torch.Generator().manual_seed(100 * dist.get_rank() + step))


def plain(model: Net, optimizer: ParallelMuon, step: int) -> None:
    optimizer.zero_grad()
    model(tokens(step)).square().mean().backward()


def clipped(model: Net, optimizer: ParallelMuon, step: int) -> None:
    plain(model, optimizer, step)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def replaced_state(model: Net, optimizer: ParallelMuon, step: int) -> None:
    plain(model, optimizer, step)
    if step == 2:
        state = optimizer.state_dict()
        state["state"] = {key: {k: v.clone() for k, v in values.items()} for key, values in state["state"].items()}
        for values in state["state"].values():
            for key in {"momentum_buffer", "second_momentum_buffer"} & values.keys():
                values[key].mul_(0.5)
        optimizer.load_state_dict(state)


def new_momentum(model: Net, optimizer: ParallelMuon, step: int) -> None:
    plain(model, optimizer, step)
    for group in optimizer.param_groups:
        group["momentum"] = 0.9 - 0.1 * step


def branch_on_some_steps(model: Net, optimizer: ParallelMuon, step: int) -> None:
    optimizer.zero_grad()
    model(tokens(step), branch=step % 2 == 0).square().mean().backward()


def branch_on_some_ranks(model: Net, optimizer: ParallelMuon, step: int) -> None:
    optimizer.zero_grad()
    model(tokens(step), branch=True).square().mean().backward()
    if dist.get_rank() == 1 and step % 2 == 0:
        model.branch.weight.grad = None


def unfrozen_later(model: Net, optimizer: ParallelMuon, step: int) -> None:
    if step == 2:
        model.branch.requires_grad_(False)
    plain(model, optimizer, step)


BACKWARDS = [
    plain,
    clipped,
    replaced_state,
    new_momentum,
    branch_on_some_steps,
    branch_on_some_ranks,
    unfrozen_later,
]
