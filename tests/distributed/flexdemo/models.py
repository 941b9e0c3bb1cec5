"""A model sharded by FSDP2 inside of each node, whose ranks see different data, and its gradients in one process."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_muon import FlexDeMo
from tests.distributed.flexdemo.setup import Ranks

NUM_TOKENS = 11


class Net(nn.Module):
    """Odd shapes, tied, frozen and unused weights, a convolution, and a branch that the caller chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(5, 3)
        self.embed = nn.Embedding(NUM_TOKENS, 13)
        self.first = nn.Linear(13, 7)
        self.norm = nn.LayerNorm(7)
        self.convolution = nn.Conv2d(1, 3, 3, padding=1)
        self.second = nn.Linear(21, 13, bias=False)
        self.branch = nn.Linear(13, 13)
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.head = nn.Linear(13, NUM_TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, *, branch: bool = True) -> Tensor:
        x = self.embed(tokens) + self.frozen(self.embed(tokens))
        hidden = self.norm(torch.tanh(self.first(x)))
        x = x + self.second(self.convolution(hidden.unsqueeze(1)).transpose(1, 2).flatten(2))
        return self.head(self.branch(x) if branch else x)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What all ranks do."""

    mesh_shape: tuple[int, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    num_steps: int = 3
    micro_batches: int = 1  # Backward passes per step; the gradients are reduced in the last one.
    max_norm: float | None = None  # To which each node clips its gradients.
    branch_nodes: Sequence[int] = tuple(range(4))  # Those whose forward takes the branch.

    @property
    def world_size(self) -> int:
        return self.mesh_shape[0] * self.mesh_shape[1]


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


def loss(model: nn.Module, plan: Plan, step: int, node: int, shard_rank: int, micro_batch: int) -> Tensor:
    """Loss of one micro-batch of one rank."""
    seed = 10_000 * step + 100 * micro_batch + 10 * node + shard_rank
    tokens = torch.randint(NUM_TOKENS, (3, 6), generator=torch.Generator().manual_seed(seed))
    logits = model(tokens[:, :-1], branch=node in plan.branch_nodes)
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / plan.micro_batches


class ShardedNet(Ranks):
    """The calling rank's part of the model, and its optimizer."""

    def __init__(self, plan: Plan) -> None:
        self.case = self.plan = plan  # type: ignore[assignment]
        self.mesh = init_device_mesh("cpu", plan.mesh_shape, mesh_dim_names=("replicate", "shard"))
        self.node, self.shard_rank = self.mesh.get_local_rank("replicate"), self.mesh.get_local_rank("shard")
        self.model = make_net()
        for unit in (self.model.first, self.model.convolution, self.model.second, self.model.branch):
            fully_shard(unit, mesh=self.mesh["shard"])
        fully_shard(self.model, mesh=self.mesh["shard"])
        self.optimizer = FlexDeMo(self.model, **({"lr": 0.01, "mesh": self.mesh} | dict(plan.options)))

    def set_gradients(self, step: int) -> None:
        """All backward passes of a step, and clipping."""
        self.optimizer.zero_grad()
        assert isinstance(self.model, FSDPModule)
        for micro_batch in range(self.plan.micro_batches):
            is_last = micro_batch == self.plan.micro_batches - 1
            self.model.set_requires_gradient_sync(is_last)
            self.model.set_is_last_backward(is_last)
            loss(self.model, self.plan, step, self.node, self.shard_rank, micro_batch).backward()
        if self.plan.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.max_norm)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        self.model.reshard()
        return dict(self.model.named_parameters())


def node_gradients(model: nn.Module, plan: Plan, step: int, node: int) -> dict[str, Tensor]:
    """Mean over the ranks of a node of the gradients of their batches, clipped; unused weights have none."""
    twin = deepcopy(model)
    for shard_rank in range(plan.mesh_shape[1]):
        for micro_batch in range(plan.micro_batches):
            (loss(twin, plan, step, node, shard_rank, micro_batch) / plan.mesh_shape[1]).backward()
    if plan.max_norm is not None:
        torch.nn.utils.clip_grad_norm_(twin.parameters(), plan.max_norm)
    return {name: parameter.grad for name, parameter in twin.named_parameters() if parameter.grad is not None}
