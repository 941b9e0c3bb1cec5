"""The models and optimizers that ``gradient_sync.py`` compares."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from lightning_muon import ParallelMuon
from lightning_muon.cli.doctor import this_device
from lightning_muon.params.layout import local_tensor
from lightning_muon.sharding.base import ModeOptions
from lightning_muon.sharding.modes import make_mode

LR, WEIGHT_DECAY = 1e-3, 0.01
HEADS = 4
ZERO, DDP = "torch DDP + ZeroRedundancyOptimizer(AdamW)", "torch DDP + AdamW"
MIB = 2**20


def _set_gradient_sync(net: nn.Module, enabled: bool) -> None:
    for unit in net.modules():
        if isinstance(unit, FSDPModule):
            unit.set_requires_gradient_sync(enabled, recurse=False)
            unit.set_is_last_backward(enabled)


class Block(nn.Module):
    """Attention and feed-forward part of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.queries, self.keys, self.values, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> the same."""
        inputs = self.norms[0](x)
        q, k, v = (
            part(inputs).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.queries, self.keys, self.values)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    """A small language model; with the defaults of this script 10.5 million parameters."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(arguments.words, arguments.width)
        self.blocks = nn.ModuleList(Block(arguments.width) for _ in range(arguments.layers))
        self.head = nn.Linear(arguments.width, arguments.words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) -> logits (batch, length, words)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass(kw_only=True)
class Contender:
    """A model and its optimizers, and what has to be called around them.

    Attributes:
        net: What is called.
        optimizers: All of them.
        no_sync: For all micro-batches but the last.
        finish_gradients: After the last backward pass.
        wait: Until all parameters have arrived.
        gradient: The calling rank's part of a reduced gradient.
        mode: The mode of this package, if it is one.
    """

    net: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    no_sync: Callable[[], AbstractContextManager[Any]]
    finish_gradients: Callable[[], None] = lambda: None
    wait: Callable[[], None] = lambda: None
    gradient: Callable[[Tensor], Tensor | None] = lambda parameter: parameter.grad
    mode: Any = None

    def backward(self, batches: Sequence[Tensor]) -> Tensor:
        """Gradients of one step; returns the loss of the last micro-batch."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = torch.zeros(())
        for index, tokens in enumerate(batches):
            with nullcontext() if index == len(batches) - 1 else self.no_sync():
                loss = F.cross_entropy(self.net(tokens).flatten(0, 1), tokens.flatten())
                (loss / len(batches)).backward()
        self.finish_gradients()
        return loss.detach()

    def step(self) -> None:
        """Step all optimizers."""
        for optimizer in self.optimizers:
            optimizer.step()
        if self.mode is not None:
            self.mode.end_step()

    def held(self) -> tuple[int, int, int]:
        """Bytes of parameters, gradients and optimizer state on this rank; call it before :meth:`step`."""
        parameters = list(self.net.parameters())
        gradients = [self.gradient(parameter) for parameter in parameters]
        inner = [getattr(optimizer, "optim", optimizer) for optimizer in self.optimizers]
        state = [value for each in inner for values in each.state.values() for value in values.values()]
        return num_bytes(parameters), num_bytes(gradients), num_bytes(state)


def num_bytes(tensors: Iterable[Any]) -> int:
    """Size of the memory of the local parts, shared memory once."""
    found = [local_tensor(tensor) for tensor in tensors if isinstance(tensor, Tensor)]
    return sum({(t.data_ptr(), t.numel()): t.numel() * t.element_size() for t in found}.values())


def muon(net: nn.Module) -> list[torch.optim.Optimizer]:
    return [ParallelMuon(net, LR, WEIGHT_DECAY)]


def adamw(net: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(net.parameters(), LR, weight_decay=WEIGHT_DECAY)]


def parallel_adamw(net: nn.Module, **options: Any) -> list[torch.optim.Optimizer]:
    return [ParallelMuon(net, LR, WEIGHT_DECAY, algorithm="adamw", **options)]


def unchecked_adamw(net: nn.Module) -> list[torch.optim.Optimizer]:
    """As the other contenders, which do not look for NaN."""
    return parallel_adamw(net, error_if_nonfinite=False)


def torch_muon(net: nn.Module) -> list[torch.optim.Optimizer]:
    named = dict(net.named_parameters())
    matrices = [
        p for name, p in named.items() if p.ndim == 2 and not name.endswith(("embedding.weight", "head.weight"))
    ]
    rest = [p for p in named.values() if all(p is not matrix for matrix in matrices)]
    return [
        torch.optim.Muon(matrices, LR, WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, LR, weight_decay=WEIGHT_DECAY),
    ]


def zero(net: nn.Module) -> list[torch.optim.Optimizer]:
    return [
        ZeroRedundancyOptimizer(
            net.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=LR, weight_decay=WEIGHT_DECAY
        )
    ]


Optimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]


def ours(name: str, optimizers: Optimizers, arguments: argparse.Namespace) -> Contender:
    net = new_net(arguments)
    mesh = init_device_mesh(this_device().type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    mode = make_mode(name, mesh, ModeOptions(bucket_bytes=int(arguments.bucket_mib * MIB)))
    mode.prepare(net)
    made = optimizers(net)
    mode.attach(net, made)
    return Contender(
        net=net,
        optimizers=made,
        no_sync=mode.no_sync,
        finish_gradients=mode.finish_gradients,
        wait=mode.finish_parameters,
        gradient=mode.layout.gradient,
        mode=mode,
    )


def distributed_data_parallel(optimizers: Optimizers, arguments: argparse.Namespace) -> Contender:
    # As views of the buckets, so that gradients are not held twice.
    net = DistributedDataParallel(new_net(arguments), gradient_as_bucket_view=True, bucket_cap_mb=arguments.bucket_mib)
    return Contender(net=net, optimizers=optimizers(net.module), no_sync=net.no_sync)


def fsdp2(optimizers: Optimizers, arguments: argparse.Namespace) -> Contender:
    net = new_net(arguments)
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)

    class NoSync:
        def __enter__(self) -> None:
            _set_gradient_sync(net, False)

        def __exit__(self, *_: object) -> None:
            _set_gradient_sync(net, True)

    return Contender(net=net, optimizers=optimizers(net), no_sync=NoSync)


def new_net(arguments: argparse.Namespace) -> Transformer:
    torch.manual_seed(0)
    return Transformer(arguments).to(this_device())


CONTENDERS: dict[str, Callable[[argparse.Namespace], Contender]] = {
    "zero2 + ParallelMuon": lambda arguments: ours("zero2", muon, arguments),
    "fsdp + ParallelMuon": lambda arguments: ours("fsdp", muon, arguments),
    "ddp + ParallelMuon": lambda arguments: ours("ddp", muon, arguments),
    "torch DDP + torch.optim.Muon and AdamW": lambda arguments: distributed_data_parallel(torch_muon, arguments),
    "zero2 + AdamW": lambda arguments: ours("zero2", parallel_adamw, arguments),
    "zero2 + AdamW, error_if_nonfinite=False": lambda arguments: ours("zero2", unchecked_adamw, arguments),
    ZERO: lambda arguments: distributed_data_parallel(zero, arguments),
    "ddp + AdamW": lambda arguments: ours("ddp", adamw, arguments),
    DDP: lambda arguments: distributed_data_parallel(adamw, arguments),
    "fsdp + AdamW": lambda arguments: ours("fsdp", adamw, arguments),
    "FSDP2 + AdamW (ModelParallelStrategy)": lambda arguments: fsdp2(adamw, arguments),
}
