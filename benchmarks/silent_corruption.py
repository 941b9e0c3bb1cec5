"""How many flipped bits of weights and optimizer state ``check_replicas_every_n_steps`` finds while a model trains.

    python benchmarks/silent_corruption.py

Processes on this machine train a small model. After a random step one bit of one number of one rank is flipped, and the
training goes on for as many steps as there are between two checks. Found is a flip if all ranks raise the same error,
and it names the tensor and, with three ranks or more, the rank. Others the training has overwritten in the meantime.
"""

from __future__ import annotations

import argparse
import random
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_muon import DCTTopK, FlexDeMoConfig, Options
from lightning_muon.engine.training import TrainingEngine
from lightning_muon.monitor.calibrate import run_on_ranks
from lightning_muon.params.layout import local_tensor
from lightning_muon.sharding.weights import names_of

EVERY = 3
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Setting:
    """A way to train, and the tensors that have a copy on another rank."""

    options: dict[str, Any]
    num_ranks: int
    has_copies_of: tuple[str, ...]


_NODES = FlexDeMoConfig(base="adamw", replicator=DCTTopK(chunk_size=8, top_k=8), check_every=0)
SETTINGS = {
    "ddp, 3 ranks": Setting({"sharding": "ddp"}, 3, ("weights", "state")),
    "fsdp, 2 replicas x 2 shards": Setting({"replicate_size": 2}, 4, ("weights", "state")),
    "zero2, 2 replicas x 2 shards": Setting({"sharding": "zero2", "replicate_size": 2}, 4, ("weights", "state")),
    "FlexDeMo, 3 nodes": Setting({"optimizer": _NODES, "replicate_size": 3}, 3, ("weights",)),
}


def start(options: dict[str, Any], every: int = EVERY) -> TrainingEngine:
    """A small model with an engine and its optimizer. Collective over all ranks; every rank must call it."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(13, 8), nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 13))
    chosen = Options(**options, check_replicas_every_n_steps=every)
    meshes = chosen.make("cpu", num_nodes=1, num_processes=dist.get_world_size(), by_nodes=chosen.has_nodes)
    silent: Any = lambda _: None  # noqa: E731
    engine = TrainingEngine(module, chosen, meshes, mode_options=chosen.mode_options, info=silent, warn=silent)
    engine.shard(torch.device("cpu"))
    engine.attach([torch.optim.AdamW(module.parameters(), lr=1e-3)], source="the benchmark")
    return engine


def step(engine: TrainingEngine, number: int) -> None:
    """One step on a batch of this rank. Collective over all ranks; every rank must call it."""
    (optimizer,) = engine.optimizers
    tokens = torch.randint(13, (4,), generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
    with engine.around_forward():
        loss = F.cross_entropy(engine.module(tokens), tokens.flip(0))
    with engine.around_backward():
        loss.backward()
    engine.step(optimizer, lambda each: each.step())
    optimizer.zero_grad()


def tensors(engine: TrainingEngine, kind: str) -> dict[str, Tensor]:
    """What this rank has of the weights, or of the optimizer's state, by the names of errors. Local."""
    named: dict[str, Tensor] = dict(names_of(engine.module))
    if kind == "state":
        state = engine.optimizers[0].state
        named = {
            f"{key} of {name}": value
            for name, parameter in named.items()
            for key, value in state[parameter].items()
            if value.ndim
        }
    return {name: local_tensor(value.detach()) for name, value in named.items()}


def flip(engine: TrainingEngine, kind: str, draw: random.Random) -> str:
    """Flip one bit on this rank, and return the name of the tensor."""
    name, tensor = draw.choice([item for item in tensors(engine, kind).items() if item[1].numel()])
    bits = tensor.view(-1).view(_INTEGERS[tensor.element_size()])
    bits[draw.randrange(bits.numel())] ^= 1 << draw.randrange(8 * tensor.element_size() - 1)
    return name


def is_found(engine: TrainingEngine, kind: str, seed: int) -> bool:
    """Flip one bit on one rank, and train on; weights and state are then what they were.

    Collective over all ranks; every rank must call it.
    """
    draw = random.Random(seed)
    rank, message, name = draw.randrange(dist.get_world_size()), "", [""]
    for number in range(draw.randrange(1, 2 * EVERY)):
        step(engine, number)
    engine.mode.finish_parameters()
    before = {
        each: {key: value.clone() for key, value in tensors(engine, each).items()} for each in ("weights", "state")
    }
    if dist.get_rank() == rank:
        name = [flip(engine, kind, draw)]
    dist.broadcast_object_list(name, src=rank)
    try:
        for number in range(EVERY):
            step(engine, number)
    except RuntimeError as error:
        message = str(error)
    engine.mode.finish_parameters()
    for each, saved in before.items():
        for key, value in tensors(engine, each).items():
            value.copy_(saved[key])
    messages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    names_rank = f"(on rank {rank})" in message or "between ranks" in message
    return len(set(messages)) == 1 and "silent corruption" in message and name[0] in message and names_rank


def count(options: dict[str, Any], kind: str, number: int) -> int:
    """How many of so many flips are found. Collective over all ranks; every rank must call it."""
    engine = start(options)
    return sum(is_found(engine, kind, seed) for seed in range(number))


def main() -> None:
    """Print the rows of the table in docs/reliability.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=100, help="flips for each entry of the table")
    number = parser.parse_args().number
    for name, setting in SETTINGS.items():
        cells: list[str] = []
        for kind in ("weights", "state"):
            is_tried = kind in setting.has_copies_of
            found: Any = (
                run_on_ranks(count, setting.options, kind, number, num_ranks=setting.num_ranks) if is_tried else 0
            )
            cells.append(f"{found} / {number}" if is_tried else "no copies")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
