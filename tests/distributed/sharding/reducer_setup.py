"""A model with a reducer, and the same model in one process to compare with."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_muon.comm.groups import axis_group, own_group
from lightning_muon.sharding.reducer import GradientReducer, Results
from lightning_muon.sharding.replicas import AllReducedBucket
from lightning_muon.sharding.zero2 import Bucket, ShardMap, Zero2Layout, place_shards
from tests.distributed.sharding.training import mesh_of

ALL_REDUCE, HOLDERS = "all_reduce", "reduce_to_holders"
# Sums over the ranks are added in another order than those of the reference.
TOLERANCE = {"rtol": 0, "atol": 1e-6}


class Odd(nn.Module):
    """Odd sizes, tied, frozen, unused, no dimensions, no elements, and branches that the caller chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.hidden = nn.Linear(7, 13)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 5))
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.unused = nn.Linear(3, 5)
        self.branches = nn.ModuleList(nn.Linear(13, 7) for _ in range(2))
        self.skip = nn.Linear(13, 7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, branches: Sequence[int]) -> Tensor:
        hidden = self.frozen(torch.tanh(self.hidden(self.embedding(tokens)))) * self.scale + self.empty.sum()
        return self.head(sum((self.branches[index](hidden) for index in branches), self.skip(hidden)))


Loss = Callable[[nn.Module, int], Tensor]


def shard_map_of(parameters: Sequence[Tensor], whole: Mapping[Tensor, int], mesh_shape: tuple[int, ...]) -> ShardMap:
    """Those of ``whole`` have one owner each on the last axis of a mesh of all ranks."""
    return ShardMap(mesh_of(mesh_shape), place_shards(parameters, whole, mesh_shape[-1]))


class Setup:
    """A model with a reducer, and a copy of it for the gradients of all ranks in one process."""

    def __init__(
        self, kind: str, mesh_shape: tuple[int, ...], model: nn.Module | None = None, bucket_bytes: int = 300
    ) -> None:
        torch.manual_seed(0)
        self.model = model or Odd()
        self.reference = deepcopy(self.model)
        self.names = {parameter: name for name, parameter in self.model.named_parameters()}
        parameters = list(self.model.parameters())
        owned = {parameter: parameter.numel() for parameter in parameters[1:3]}
        self.shard_map = shard_map_of(parameters, owned, mesh_shape)
        group = axis_group(self.shard_map.mesh, tuple(range(len(mesh_shape))))
        self.layout = Zero2Layout(self.shard_map, [], {}) if kind == HOLDERS else None
        self.results, own = Results(), own_group(group)
        make_bucket = partial(Bucket, shards=self.shard_map) if self.layout else partial(AllReducedBucket, group=own)
        self.reducer = GradientReducer(
            parameters, make_bucket, group, results=self.results, names=self.names, bucket_bytes=bucket_bytes
        )

    def finish(self) -> None:
        """The sums of all gradients, as a mode keeps them."""
        sums = self.reducer.finish()
        if self.layout is not None:
            self.layout.add_gradients(sums)
            return
        for parameter, gradient in sums.items():
            self.results.keep(parameter, gradient)

    def reduced(self, parameter: Tensor) -> Tensor | None:
        """The calling rank's part of the reduced gradient."""
        if self.layout is not None:
            assert parameter.grad is None
            return self.layout.gradient(parameter)
        return None if parameter.grad is None else self.shard_map.local(parameter, parameter.grad)

    def step(self, loss: Loss, **tolerance: float) -> set[str]:
        """A whole step; the names of the gradients that were there."""
        self.backward(loss)
        self.finish()
        present = self.check(**tolerance)
        self.zero_grad()
        return present

    def zero_grad(self) -> None:
        self.model.zero_grad()
        self.reference.zero_grad()
        if self.layout is not None:
            self.layout.forget(list(self.names))

    def backward(self, loss: Loss) -> None:
        loss(self.model, dist.get_rank()).backward()
        self.refer(loss)

    def refer(self, loss: Loss) -> None:
        for rank in range(dist.get_world_size()):
            value = loss(self.reference, rank)
            if value.requires_grad:
                value.backward()

    def check(self, divisor: float | None = None, **tolerance: float) -> set[str]:
        """Compare with the reference; returns the names of what is present."""
        present: set[str] = set()
        for parameter, expected in zip(self.names, self.reference.parameters(), strict=True):
            name, reduced = self.names[parameter], self.reduced(parameter)
            assert (reduced is None) == (expected.grad is None), name
            if reduced is not None and expected.grad is not None:
                present.add(name)
                whole = (expected.grad / (divisor or dist.get_world_size())).contiguous()
                torch.testing.assert_close(
                    {name: reduced}, {name: self.shard_map.local(parameter, whole)}, **(tolerance or TOLERANCE)
                )
        return present


def odd_loss(seed: int, branches: Sequence[Sequence[int]]) -> Loss:
    """Rank ``r`` uses ``branches[r]``, in this order, on tokens of its own."""

    def loss(model: nn.Module, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * seed + rank)
        tokens = torch.randint(11, (4, 3), generator=generator)
        return nn.functional.cross_entropy(model(tokens, branches[rank]).flatten(0, 1), tokens.flatten())

    return loss


SAME = [[0, 1]] * 4
# By rank: which branches, in which order.
USES = [SAME, [[0], [1], [], [1, 0]], [[0, 1], [1, 0], [0], [0]], [[0]] * 4, [[], [1], [1], []], SAME]


class SparseAndHalf(nn.Module):
    """A sparse embedding gradient, and weights in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, sparse=True)
        self.output = nn.Linear(6, 5).bfloat16()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.embedding(tokens).bfloat16()).float()
