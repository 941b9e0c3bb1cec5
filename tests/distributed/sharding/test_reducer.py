"""Gradients that hooks of backward reduce (ddp and zero2) are the means of all ranks in unusual steps."""

from collections.abc import Callable, Collection
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_muon import ModeOptions, ParallelMuon, make_mode
from tests.distributed.sharding.training import mesh_of, model
from tests.matrix.row import Row
from tests.support.processes import ProcessPool

Loss = Callable[[nn.Module, int], Tensor]
ROW = Row(ranks=4)
EVERYONE = range(4)


class Pair:
    """A model under a mode, and the same in one process with the mean of the gradients of all ranks."""

    def __init__(self, kind: str, net: nn.Module | None = None, bucket_bytes: int = 300) -> None:
        torch.manual_seed(0)
        self.net = net or model()
        self.alone, self.rank, self.num_ranks = deepcopy(self.net), dist.get_rank(), dist.get_world_size()
        self.mode = make_mode(kind, mesh_of((self.num_ranks,)), ModeOptions(bucket_bytes=bucket_bytes))
        self.mode.prepare(self.net)
        # An eps that lets the size of a gradient show.
        self.optimizer = ParallelMuon(self.net.named_parameters(), algorithm="adamw", lr=0.01, adamw_eps=1.0)
        self.mode.attach(self.net, [self.optimizer])
        self.reference = torch.optim.AdamW(self.alone.parameters(), lr=0.01, eps=1.0, weight_decay=0.1)

    def backward(self, loss: Loss, ranks: Collection[int] = EVERYONE) -> None:
        if self.rank in ranks:
            loss(self.net, self.rank).backward()
        for rank in range(self.num_ranks):
            if rank in ranks:
                (loss(self.alone, rank) / self.num_ranks).backward()

    def step(self, tolerance: float = 1e-6) -> None:
        for parameter in self.alone.parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        self.mode.finish_gradients()
        self.optimizer.step()
        self.reference.step()
        self.mode.finish_parameters()
        for (name, found), expected in zip(self.net.named_parameters(), self.alone.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")
        self.optimizer.zero_grad()
        self.reference.zero_grad()


def _loss_of(step: int) -> Loss:
    # A sum: gradients of a size at which eps counts.
    return lambda net, rank: 50 * ROW.loss(net, ROW.batch(step, 0, rank))


def _thaw(kind: str) -> None:
    pair = Pair(kind)
    for step, (name, is_trainable) in enumerate([("tail.frozen", True), ("blocks.0", False), ("blocks.0", True)]):
        for each in (pair.net, pair.alone):
            each.get_submodule(name).requires_grad_(is_trainable)
        pair.backward(_loss_of(step))
        pair.step()


def _idle(kind: str) -> None:
    """Rank 1 has no backward pass in the first two steps."""
    pair = Pair(kind)
    for step in range(4):
        pair.backward(_loss_of(step), ranks=[0, 2] if step < 2 else EVERYONE)
        pair.step()


class SparseAndHalf(nn.Module):
    """A sparse gradient, which no layer tells of, and weights in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.output = nn.Parameter(torch.randn(11, 6)), nn.Linear(6, 5).bfloat16()

    def forward(self, tokens: Tensor) -> Tensor:
        rows = nn.functional.embedding(tokens, self.table, sparse=True)
        return self.output(rows.bfloat16()).float()


def _sparse_and_half(kind: str) -> None:
    pair = Pair(kind, SparseAndHalf())
    for _ in range(2):
        pair.backward(lambda model, rank: model(torch.arange(rank, rank + 5)).square().sum())
        # The reference adds up in bfloat16, whose last of 8 bits is 2**-8 of the value.
        pair.step(tolerance=2**-8)


def _communicate_in_hooks(kind: str) -> None:
    """Rank 0 is in a collective of the user's before any bucket is launched, rank 1 joins it after most have been."""
    net, total = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4))), torch.tensor(1.0)
    pair = Pair(kind, net, bucket_bytes=1)

    def add(gradient: Tensor) -> None:
        dist.all_reduce(total)

    net[3 if dist.get_rank() == 0 else 0].weight.register_hook(add)
    pair.backward(lambda model, rank: model(torch.full((2, 5), rank + 1.0)).square().sum())
    pair.step()
    assert float(total) == 2.0


@pytest.mark.parametrize("kind", ["ddp", "zero2"])
@pytest.mark.parametrize(
    ("steps", "world_size"), [(_thaw, 2), (_idle, 3), (_sparse_and_half, 3), (_communicate_in_hooks, 2)]
)
def test_sums_are_exact_in_unusual_steps(
    gloo: ProcessPool, kind: str, steps: Callable[[str], None], world_size: int
) -> None:
    gloo.run(steps, kind, world_size=world_size)
