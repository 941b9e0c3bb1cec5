"""One model with everything that is odd, trained with any mode on many ranks, and by one process in place of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_muon import ParallelMuon
from lightning_muon.sharding.base import ModeOptions, ShardingMode
from lightning_muon.sharding.modes import make_mode
from tests.support.tensors import weights_of

WORDS, WIDTH, LENGTH, ROWS = 11, 7, 5, 2


class Block(nn.Module):
    """A unit; its norm has fewer rows than four ranks would like."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 13)
        self.down = nn.Linear(13, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class OddNet(nn.Module):
    """Tied, frozen, unused, conditional, 0-d and stacked parameters, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.experts = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 5)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(3, 5)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, branch: int) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        x = x + torch.tanh(self.branches[branch](x)) + torch.einsum("btd,edf->btf", x, self.experts) * self.scale
        return self.head(self.frozen(x))


def first_branch(step: int, rank: int) -> int:
    return 0


def branch_by_rank(step: int, rank: int) -> int:
    """Ranks use different branches; in the first step none uses the second."""
    return (rank + step) % 2 if step else 0


@dataclass(frozen=True)
class Run:
    accumulate: int = 1
    max_norm: float | None = None
    branch_of: Callable[[int, int], int] = first_branch
    steps: int = 3


def model() -> OddNet:
    torch.manual_seed(3)
    return OddNet()


def optimizer_for(net: nn.Module) -> ParallelMuon:
    return ParallelMuon(net, lr=0.02, weight_decay=0.1, compute_dtype="float32", wire_dtype="float32")


def loss(net: nn.Module, run: Run, step: int, micro_batch: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + rank)
    tokens = torch.randint(WORDS, (ROWS, LENGTH), generator=generator)
    logits = net(tokens, run.branch_of(step, rank))
    return F.cross_entropy(logits.flatten(0, 1), (3 * tokens.flatten() + 1) % WORDS) / run.accumulate


def train_alone(run: Run, num_ranks: int) -> dict[str, Tensor]:
    """One process computes the losses of all ranks, one after the other."""
    net = model()
    optimizer = optimizer_for(net)
    for step in range(run.steps):
        optimizer.zero_grad()
        for micro_batch in range(run.accumulate):
            for rank in range(num_ranks):
                (loss(net, run, step, micro_batch, rank) / num_ranks).backward()
        if run.max_norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), run.max_norm)
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


@dataclass
class Training:
    mode: ShardingMode
    net: OddNet
    optimizer: ParallelMuon

    @classmethod
    def start(cls, name: str, mesh: DeviceMesh, **options: Any) -> Training:
        net = model()
        with torch.no_grad():  # Ranks begin with different weights; those of the first one count.
            for parameter in net.parameters():
                parameter.add_(dist.get_rank())
        mode = make_mode(name, mesh, ModeOptions(**options))
        mode.prepare(net)
        optimizer = optimizer_for(net)
        mode.attach(net, [optimizer])
        return cls(mode, net, optimizer)

    def step(self, run: Run, step: int) -> None:
        self.optimizer.zero_grad()
        for micro_batch in range(run.accumulate):
            is_last = micro_batch == run.accumulate - 1
            with nullcontext() if is_last else self.mode.no_sync():
                loss(self.net, run, step, micro_batch, dist.get_rank()).backward()
        self.mode.finish_gradients()
        if run.max_norm is not None:
            self.mode.clip_grad_norm_(self.optimizer, run.max_norm)
        self.optimizer.step()
        self.mode.end_step()

    def weights(self) -> dict[str, Tensor]:
        self.mode.finish_parameters()
        return weights_of(self.net)


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def distributed_over(mesh_shape: tuple[int, ...], shard_dim: int | None) -> Callable[[Tensor], Tensor]:
    """Shards tensors over the last axis of such a mesh, or replicates them, and replicates over the others."""
    mesh, last = mesh_of(mesh_shape), Replicate() if shard_dim is None else Shard(shard_dim)
    placements = [*[Replicate()] * (len(mesh_shape) - 1), last]
    # All ranks have the same tensor, so that nothing needs to be sent.
    return lambda tensor: distribute_tensor(tensor.clone(), mesh, placements, src_data_rank=None)


def train(name: str, shape: tuple[int, ...], run: Run, options: dict[str, Any] | None = None) -> dict[str, Tensor]:
    training = Training.start(name, mesh_of(shape), **(options or {}))
    for step in range(run.steps):
        training.step(run, step)
    return training.weights()


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> tuple[float, str]:
    """Over all weights, relative to numbers of size 1, and where it is."""
    assert one.keys() == other.keys()
    return max((float((one[name].double() - other[name].double()).abs().max()), name) for name in one)
