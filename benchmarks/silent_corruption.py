"""How many flipped bits ``check_replicas_every_n_steps`` finds while a model trains.

    python benchmarks/silent_corruption.py

Processes on this machine train a small model. After a random step a bit of one rank is flipped, and the training goes
on for as many steps as there are between two checks: one bit of one number of the weights or of the optimizer state;
one bit of each result of Newton-Schulz that the rank owns, in each of these steps; or one bit of one of them, in one of
the steps. Found is a flip if all ranks raise the same error, and it names the tensor and, with three ranks or more, the
rank; or the matrix, its owner, and the rank that came to other bits. Others the training has overwritten in the
meantime, nobody has computed again, or no step was taken any more, because they made the loss infinite.
"""

from __future__ import annotations

import argparse
import random
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.ranks import run_on_ranks
from lightning_muon import DCTTopK, FlexDeMoConfig, MuonConfig, Options
from lightning_muon.engine.training import TrainingEngine
from lightning_muon.optim.transfer import Transfer
from lightning_muon.params.layout import local_tensor
from lightning_muon.sharding.weights import names_of

EVERY = 3
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


KINDS = ("weights", "state", "updates", "one update")


@dataclass(frozen=True)
class Setting:
    """A way to train, and what of it can be compared with another rank."""

    options: dict[str, Any]
    num_ranks: int
    kinds: tuple[str, ...] = KINDS


_NODES = FlexDeMoConfig(base="muon", replicator=DCTTopK(chunk_size=8, top_k=8), check_every=0)
_SHARED = MuonConfig(dedupe="always")
SETTINGS = {
    "ddp, 3 ranks": Setting({"sharding": "ddp", "optimizer": _SHARED}, 3),
    "fsdp, 3 ranks": Setting({"optimizer": _SHARED}, 3, ("updates", "one update")),
    "fsdp, 2 replicas x 2 shards": Setting({"replicate_size": 2, "optimizer": _SHARED}, 4),
    "zero2, 2 replicas x 2 shards": Setting({"sharding": "zero2", "replicate_size": 2}, 4),
    "FlexDeMo, 3 nodes": Setting({"optimizer": _NODES, "replicate_size": 3}, 3, ("weights", *KINDS[2:])),
}


def start(options: dict[str, Any], every: int = EVERY) -> TrainingEngine:
    """A small model with an engine and its optimizer. Collective over all ranks; every rank must call it."""
    torch.manual_seed(0)
    # On a CPU matrices of 32 x 32 go through Newton-Schulz as a batch, those of 8 x 32 one by one.
    hidden = [nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 32), *(nn.Linear(32, 32) for _ in range(6))]
    module = nn.Sequential(nn.Embedding(13, 8), *hidden, nn.Tanh(), nn.Linear(32, 13))
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


def flip_bit(tensor: Tensor, draw: random.Random) -> None:
    """Flip one bit of one number of a tensor."""
    number = tensor[tuple(draw.randrange(size) for size in tensor.shape)]
    number.view(_INTEGERS[tensor.element_size()]).bitwise_xor_(1 << draw.randrange(8 * tensor.element_size() - 1))


def flip(engine: TrainingEngine, kind: str, draw: random.Random) -> str:
    """Flip one bit on this rank, and return the name of the tensor."""
    name, tensor = draw.choice([item for item in tensors(engine, kind).items() if item[1].numel()])
    flip_bit(tensor, draw)
    return name


def broken_owner(draw: random.Random, *, flips_all: bool = True) -> Any:
    """Inside, this rank flips a bit in each result of Newton-Schulz, or in one of each bucket, before it leaves."""
    pack_updates = Transfer.pack_updates

    def pack_wrong(transfer: Transfer, updates: Mapping[Any, Tensor]) -> None:
        owned = list(updates.values())
        for update in owned if flips_all else owned and [draw.choice(owned)]:
            flip_bit(update, draw)
        pack_updates(transfer, updates)

    return mock.patch.object(Transfer, "pack_updates", pack_wrong)


def is_found(engine: TrainingEngine, kind: str, seed: int) -> bool:
    """Flip bits on one rank, and train on; weights and state are then what they were.

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
    broken = range(EVERY) if kind == "updates" else [draw.randrange(EVERY)] if kind == "one update" else ()
    if dist.get_rank() == rank and not broken:
        name = [flip(engine, kind, draw)]
    dist.broadcast_object_list(name, src=rank)
    try:
        for number in range(EVERY):
            is_broken = number in broken and dist.get_rank() == rank
            with broken_owner(draw, flips_all=kind == "updates") if is_broken else nullcontext():
                step(engine, number)
    except RuntimeError as error:
        message = str(error)
    engine.mode.finish_parameters()
    for each, saved in before.items():
        for key, value in tensors(engine, each).items():
            value.copy_(saved[key])
    messages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    # Where each replica orthogonalizes for itself, a wrong update makes its weights differ from those of the others.
    of_rank = [f"(on rank {rank})", f"its owner, rank {rank}," if broken else "between ranks"]
    names_rank = any(each in message for each in of_rank)
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
        for kind in KINDS:
            is_tried = kind in setting.kinds
            found: Any = (
                run_on_ranks(count, setting.options, kind, number, num_ranks=setting.num_ranks) if is_tried else 0
            )
            cells.append(f"{found} / {number}" if is_tried else "no copy")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
