"""Short trainings through the public API; run by one process per rank, which prints a digest for each of them.

The model has what is easily got wrong: odd sizes, fewer rows than ranks, a tied embedding, a fused weight, a stack of
experts, a weight that is frozen and one that is never used. Its arithmetic is sums, products and square roots, which
every processor rounds alike; ``tests/golden/test_golden.py`` pins the order in which libraries add.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_muon import (
    DCTTopK,
    DiLoCo,
    FlexDeMoConfig,
    Full,
    MuonConfig,
    NoReplication,
    ParallelMuonFabricStrategy,
    Random,
    Slicing,
    Striding,
    forward_backward,
    full_state_dict,
)

WIDTH, VOCABULARY, LENGTH = 7, 13, 5
NUM_STEPS, ACCUMULATE, ROWS = 5, 2, 12  # ROWS: of a micro-batch, on all ranks together.
# Not the dtype of "auto", which is bfloat16 on processors with instructions for it.
OURS: dict[str, Any] = {"fused": {"*.qkv.weight": 3}, "compute_dtype": "float32"}
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_1p", "zb_2p", "zb_v", "v_half", "v_min")
REPLICATORS = {
    "dct": DCTTopK(top_k=3, chunk_size=4),
    "random": Random(0.25),
    "striding": Striding(0.25),
    "slicing": Slicing(0.25),
    "full": Full(),
    "diloco": DiLoCo(period=2),
    "none": NoReplication(),
}


class Block(nn.Module):
    """A repeated part, and so a unit of FSDP2."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, 13)
        self.down = nn.Linear(13, WIDTH)
        self.experts = nn.Parameter(torch.zeros(3, 2, WIDTH))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + query * torch.relu(key) + value
        hidden = sum(x @ expert.T for expert in self.experts)
        x = x + self.frozen(hidden @ self.experts[0])
        return x + self.down(torch.relu(self.up(x)))


class Network(nn.Module):
    """Embedding, blocks, a head; beside two blocks it has the embedding's weight, and there is an unused layer."""

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        is_small = num_blocks == 2
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=not is_small)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        if is_small:
            self.unused, self.head.weight = nn.Linear(WIDTH, 3), self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def pipeline_parts(self) -> list[nn.Module]:
        return [self.embedding, *self.blocks, self.head]

    def pipeline_step(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch

    def pipeline_loss(self, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return _squares(output, target).sum(), target.numel()


def fill(module: nn.Module) -> None:
    """Multiples of 1/64, the same everywhere."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            values = torch.randint(-20, 21, parameter.shape, generator=generator)
            parameter.copy_(values / 64 + (1.0 if parameter.ndim == 1 else 0.0))


def batch_of(step: int, index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + index)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    return tokens, (3 * tokens + 1) % VOCABULARY


def _squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - nn.functional.one_hot(target, VOCABULARY)).square().sum(-1)


def digest(*values: Any) -> str:
    """Hash of tensors, of a mapping of tensors in the order of their names, or of numbers."""
    found = hashlib.sha256()
    for value in values:
        tensors = [value[name] for name in sorted(value)] if isinstance(value, dict) else [value]
        for each in tensors:
            found.update(each.contiguous().numpy().tobytes() if isinstance(each, Tensor) else repr(each).encode())
    return found.hexdigest()[:16]


def _set_up(module: nn.Module, **options: Any) -> tuple[Fabric, Any, Any]:
    fill(module)
    size = int(os.environ["WORLD_SIZE"])
    strategy = ParallelMuonFabricStrategy(**options)
    fabric = Fabric(accelerator="cpu", devices=size, strategy=strategy)
    fabric.launch()
    adamw = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.05, betas=(0.8, 0.9))
    return fabric, *fabric.setup(module, adamw)


def train(**options: Any) -> str:
    """Digest of all weights after some clipped steps of two micro-batches."""
    fabric, model, optimizer = _set_up(Network(), **options)
    sampler = fabric.strategy.distributed_sampler_kwargs
    own = slice(sampler["rank"], None, sampler["num_replicas"])
    for step in range(NUM_STEPS):
        for index in range(ACCUMULATE):
            tokens, target = (each[own] for each in batch_of(step, index))
            with fabric.no_backward_sync(model, enabled=index < ACCUMULATE - 1):
                fabric.backward(_squares(model(tokens), target).mean() / ACCUMULATE)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
    found = digest(full_state_dict(model))
    fabric.strategy.teardown()
    return found


def train_pipeline(schedule: str) -> str:
    """Digest of the losses of three steps of a pipeline over all ranks."""
    size = int(os.environ["WORLD_SIZE"])
    options = {"pipeline_size": size, "pipeline_schedule": schedule, "pipeline_microbatches": 2 * size}
    options |= {"sharding": "none", "optimizer": MuonConfig(**OURS)}
    fabric, model, optimizer = _set_up(Network(8), **options)
    losses: list[float] = []
    for step in range(3):
        losses.append(forward_backward(model, batch_of(step, 0)).item())
        optimizer.step()
        optimizer.zero_grad()
    fabric.strategy.teardown()
    return digest(*losses)


def trainings(size: int) -> Iterator[tuple[str, Callable[[], str]]]:
    """Name of each training of so many ranks, and what runs it."""
    meshes = {mode: {"sharding": mode, "replicate_size": size} for mode in ("zero2", "ddp")}
    meshes["fsdp"] = {"shard_size": size}
    if size == 1:
        meshes["none"] = {"sharding": "none"}
    if size == 4:
        meshes["hsdp"] = {"replicate_size": 2, "shard_size": 2}
    optimizers: dict[str, Any] = {
        "muon": MuonConfig(**OURS),
        "fast": MuonConfig(ns_quality="fast", **OURS),
        "normuon": MuonConfig(normuon=True, **OURS),
        "adamw": "keep",
    }
    for mode, mesh in meshes.items():
        for name, optimizer in optimizers.items():
            if (mode, name) == ("zero2", "adamw"):
                continue  # Refused: an AdamW that is kept reads whole gradients.
            yield f"{mode} {name}", lambda mesh=mesh, optimizer=optimizer: train(optimizer=optimizer, **mesh)
    nodes = {"replicate_size": 2, "shard_size": 2} if size == 4 else {"replicate_size": size, "shard_size": 1}
    configs = {"dct signs": FlexDeMoConfig(base="sgd", replicator=REPLICATORS["dct"], dense_below=8)}
    for name, each in REPLICATORS.items():
        configs[name] = FlexDeMoConfig(base="sgd", replicator=each, sign=False, dense_below=8)
    options: dict[str, Any] = {"replicator": REPLICATORS["dct"], "dense_below": 8, **OURS}
    for base in ("adamw", "muon"):
        configs[f"dct {base}"] = FlexDeMoConfig(base=base, muon_lr_factor=1.0, **options)
    for name, config in configs.items():
        yield f"flexdemo {name}", lambda config=config: train(optimizer=config, **nodes)
    if size in (2, 4):
        for schedule in SCHEDULES:
            yield f"pipeline {schedule}", lambda schedule=schedule: train_pipeline(schedule)


def main() -> None:
    """Run all trainings; rank 0 prints their digests as JSON in the last line."""
    torch.set_num_threads(1)
    found = {name: run() for name, run in trainings(int(os.environ["WORLD_SIZE"]))}
    if os.environ["RANK"] == "0":
        sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
