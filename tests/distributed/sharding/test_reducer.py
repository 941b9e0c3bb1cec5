"""Gradients that hooks of backward reduce (ddp and zero2) are the means of all ranks in unusual steps."""

from collections.abc import Callable, Collection, Sequence
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_muon import ModeOptions, ParallelMuon, make_mode
from tests.distributed.sharding.training import mesh_of
from tests.support.processes import ProcessPool

Loss = Callable[[nn.Module, int], Tensor]
EVERYONE = range(4)


class Branches(nn.Module):
    """Odd sizes, tied, frozen, without elements, and branches that the caller chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.hidden = nn.Linear(7, 13)
        self.empty = nn.Parameter(torch.zeros(0, 5))
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.branches = nn.ModuleList(nn.Linear(13, 7) for _ in range(2))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, chosen: Sequence[int]) -> Tensor:
        hidden = self.frozen(torch.tanh(self.hidden(self.embedding(tokens)))) + self.empty.sum()
        return self.head(torch.stack([self.branches[index](hidden) for index in chosen]).sum(0))


class Pair:
    """A model under a mode, and the same in one process with the mean of the gradients of all ranks."""

    def __init__(self, kind: str, net: nn.Module | None = None, bucket_bytes: int = 300) -> None:
        torch.manual_seed(0)
        self.net = net or Branches()
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
        self.mode.end_step()
        self.reference.step()
        self.mode.finish_parameters()
        for (name, found), expected in zip(self.net.named_parameters(), self.alone.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")
        self.optimizer.zero_grad()
        self.reference.zero_grad()


def loss_of(seed: int, chosen: Sequence[int] = (0, 1)) -> Loss:
    def loss(model: nn.Module, rank: int) -> Tensor:
        tokens = torch.randint(11, (4, 3), generator=torch.Generator().manual_seed(100 * seed + rank))
        # A sum: gradients of a size at which eps counts.
        return nn.functional.cross_entropy(model(tokens, chosen).flatten(0, 1), tokens.flatten(), reduction="sum")

    return loss


def _passes(kind: str) -> None:
    """Two backward passes before one sum."""
    pair = Pair(kind)
    for seed in range(3):
        pair.backward(loss_of(seed))
        pair.backward(loss_of(seed + 10, [1]))
        pair.step()


def _thaw(kind: str) -> None:
    pair = Pair(kind)
    for seed, (name, is_trainable) in enumerate([("frozen", True), ("hidden", False), ("hidden", True)]):
        for each in (pair.net, pair.alone):
            each.get_submodule(name).requires_grad_(is_trainable)
        pair.backward(loss_of(seed))
        pair.step()


def _idle(kind: str) -> None:
    """Rank 1 has no backward pass in the first two steps."""
    pair = Pair(kind)
    for step in range(4):
        pair.backward(loss_of(step), ranks=[0, 2] if step < 2 else EVERYONE)
        pair.step()


def _come_into_use(kind: str) -> None:
    """One bucket: rank 0 has launched it without the branch that nobody has used before; rank 1 follows."""
    pair = Pair(kind, bucket_bytes=10**6)
    pair.backward(loss_of(0, [0]))
    pair.step()
    pair.backward(loss_of(1), ranks=[0])
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
    ("steps", "world_size"),
    [
        (_passes, 3),
        (_thaw, 2),
        (_idle, 3),
        (_come_into_use, 2),
        (_sparse_and_half, 3),
        (_communicate_in_hooks, 2),
    ],
)
def test_sums_are_exact_in_unusual_steps(
    gloo: ProcessPool, kind: str, steps: Callable[[str], None], world_size: int
) -> None:
    gloo.run(steps, kind, world_size=world_size)


def _refused(kind: str) -> None:
    width = 6 if kind == "different" and dist.get_rank() == 1 else 5
    Pair("ddp", nn.Linear(3, width, dtype=torch.complex64 if kind == "complex" else torch.float32))


@pytest.mark.parametrize(
    ("kind", "exception", "match"),
    [
        ("different", RuntimeError, "weight.*differs|differs.*weight"),
        ("complex", TypeError, r"weight \(5, 3\).*complex64"),
    ],
)
def test_what_cannot_be_reduced_is_refused_on_all_ranks(
    gloo: ProcessPool, kind: str, exception: type[Exception], match: str
) -> None:
    gloo.expect_error_on_all_ranks(_refused, kind, match=match, exception=exception, world_size=2)
