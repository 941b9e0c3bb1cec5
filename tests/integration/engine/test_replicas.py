"""A bit that changes on one rank only is named on all ranks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_muon import DCTTopK, FlexDeMoConfig, MuonConfig, Options
from lightning_muon.engine.training import TrainingEngine
from lightning_muon.params.layout import local_tensor
from lightning_muon.sharding.base import names_of
from tests.support.processes import ProcessPool

EVERY, NUM_FLIPS = 3, 12
_SHARED = MuonConfig(dedupe="always")
_NODES = FlexDeMoConfig(base="muon", replicator=DCTTopK(chunk_size=8, top_k=8), check_every=0)
# Options, the number of ranks, and how many of `NUM_FLIPS` flips of weights and of state are named.
SETTINGS: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "ddp": ({"sharding": "ddp", "optimizer": _SHARED}, 3, 12, 12),
    "2 replicas x 2 shards": ({"replicate_size": 2, "optimizer": _SHARED}, 4, 12, 12),
    "3 shards": ({"optimizer": _SHARED}, 3, 0, 0),
    "zero2": ({"sharding": "zero2"}, 3, 0, 0),
    "zero2, 2 replicas x 2 shards": ({"sharding": "zero2", "replicate_size": 2}, 4, 8, 12),
    "FlexDeMo, 3 nodes": ({"optimizer": _NODES, "replicate_size": 3}, 3, 12, 0),
}


def start(options: dict[str, Any], every: int = EVERY, dtype: torch.dtype = torch.float32) -> TrainingEngine:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(13, 8), nn.Linear(8, 32), nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 13)).to(
        dtype
    )
    chosen = Options(**options, check_replicas_every_n_steps=every)
    meshes = chosen.make("cpu", num_nodes=1, num_processes=dist.get_world_size(), by_nodes=chosen.has_nodes)
    silent: Any = lambda _: None  # noqa: E731
    engine = TrainingEngine(module, chosen, meshes, mode_options=chosen.mode_options, info=silent, warn=silent)
    engine.shard(torch.device("cpu"))
    engine.attach([torch.optim.AdamW(module.parameters(), lr=1e-3)], source="the test")
    return engine


def step(engine: TrainingEngine, number: int) -> None:
    (optimizer,) = engine.optimizers
    tokens = torch.randint(13, (4,), generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
    with engine.around_forward():
        loss = F.cross_entropy(engine.module(tokens), tokens.flip(0))
    with engine.around_backward():
        loss.backward()
    engine.step(optimizer, lambda each: each.step())
    optimizer.zero_grad()


def tensors(engine: TrainingEngine, kind: str) -> dict[str, Tensor]:
    """What this rank has of the weights or of the optimizer's state, by the names of errors."""
    named: dict[str, Tensor] = dict(names_of(engine.module))
    if kind == "state":
        states = [(name, engine.optimizers[0].state[parameter].items()) for name, parameter in named.items()]
        named = {f"{key} of {name}": value for name, state in states for key, value in state if value.ndim}
    return {name: local_tensor(value.detach()) for name, value in named.items()}


def flip(engine: TrainingEngine, kind: str, draw: random.Random) -> str:
    """Flip one bit that counts, but none of an exponent: the loss could become infinite, and no step be taken."""
    name, tensor = draw.choice([item for item in tensors(engine, kind).items() if item[1].any()])
    place = draw.choice(tensor.nonzero().tolist())  # A changed 0 would be too small to stay.
    tensor[tuple(place)].view(torch.int32).bitwise_xor_(1 << draw.randrange(16, 23))
    return name


def is_found(engine: TrainingEngine, kind: str, seed: int) -> bool:
    """Flip a bit on one rank between two checks; weights and state are then what they were."""
    draw = random.Random(seed)
    rank, message, name = draw.randrange(dist.get_world_size()), "", [""]
    number = draw.randrange(EVERY)
    for each in range(number):
        step(engine, each)
    engine.mode.finish_parameters()
    before = [{key: value.clone() for key, value in tensors(engine, of).items()} for of in ("weights", "state")]
    if dist.get_rank() == rank:
        name = [flip(engine, kind, draw)]
    dist.broadcast_object_list(name, src=rank)
    try:
        for each in range(number, EVERY):
            step(engine, each)
    except RuntimeError as error:
        message = str(error)
    engine.mode.finish_parameters()
    for of, saved in zip(("weights", "state"), before, strict=True):
        for key, value in tensors(engine, of).items():
            value.copy_(saved[key])
    messages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    assert len(set(messages)) == 1
    # Two copies do not say which one is right.
    who = f"(on rank {rank})" if dist.get_world_size() == 3 else "(between ranks "
    return f"differs after step {EVERY * (seed + 1)}: " in message and f"{name[0]} {who}" in message


def count(options: dict[str, Any], kind: str) -> int:
    engine = start(options)
    return sum(is_found(engine, kind, seed) for seed in range(NUM_FLIPS))


@pytest.mark.parametrize("kind", ["weights", "state"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_flipped_bits_are_named_on_all_ranks(gloo: ProcessPool, setting: str, kind: str) -> None:
    """The numbers are those of the table in docs/checkpoints.md."""
    options, size, *found = SETTINGS[setting]
    assert gloo.run(count, options, kind, world_size=size) == size * [found[kind == "state"]]


def _flipped_main() -> None:
    engine = start({"sharding": "zero2", "replicate_size": 2}, every=2, dtype=torch.bfloat16)
    for number in range(3):
        step(engine, number)
    main = engine.mode.layout.local(engine.module.get_parameter("1.weight"))
    if dist.get_rank() >= 2:  # The last bit of its owner in one replica, which no weight shows.
        main[:1, :1].view(torch.int32).bitwise_xor_(1)
    step(engine, 3)


def test_a_flipped_bit_of_a_main_weight_is_found(gloo: ProcessPool) -> None:
    match = r"differs after step 4: main weight of 1.weight \(between ranks"
    gloo.expect_error_on_all_ranks(_flipped_main, match=match, exception=RuntimeError, world_size=4)
