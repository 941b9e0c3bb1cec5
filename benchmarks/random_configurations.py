"""Trains in configurations drawn at random: each has the weights of one process, or is refused before it trains.

    python -m benchmarks.random_configurations --number 500

Options, model and number of ranks (1 to 4) are drawn. A run must end with the weights of one process that computes the
losses of all ranks one after the other, or raise ``ValueError`` on all ranks before the first step. Anything else is
printed with its seed, and ``--first SEED --number 1`` runs it again.
"""

from __future__ import annotations

import argparse
import random
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.ranks import run_on_ranks
from lightning_muon import FlexDeMoConfig, Full, MuonConfig, Options, ParallelMuon, full_state_dict
from lightning_muon.comm.agreement import gather
from lightning_muon.engine.training import TrainingEngine, parameters_of

NUM_STEPS = 3
# Newton-Schulz raises what differs in the last bits of small singular values some hundred times.
TOLERANCE = 1e-4
_LR, _EPS = 1e-2, 1e-3  # An eps that keeps AdamW from making whole steps of rounding errors.
_EXACT: dict[str, Any] = {"compute_dtype": "float32", "wire_dtype": "float32"}
_HYPERPARAMETERS = ("lr", "weight_decay", "momentum", "nesterov", "eps", "ns_steps", "adjust_lr_fn", "muon_lr_factor")
_HYPERPARAMETERS += ("betas", "adamw_eps")


class Block(nn.Module):
    """A residual unit."""

    def __init__(self, width: int, inner: int, *, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Odd sizes, and what the draw adds: stacked experts, a convolution, tied, frozen and unused weights."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        width = draw.choice([3, 5, 8, 13])
        self.embedding = nn.Embedding(11, width)
        inner = draw.choice([1, 4, 7, 24])
        self.blocks = nn.ModuleList(Block(width, inner, bias=draw.random() < 0.5) for _ in range(draw.randrange(1, 4)))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.conv = nn.Conv1d(width, width, 3, padding=1) if draw.random() < 0.3 else None
        self.experts = nn.Parameter(torch.randn(draw.choice([2, 3]), width, width) / 5) if draw.random() < 0.3 else None
        self.scale = nn.Parameter(torch.tensor(0.7)) if draw.random() < 0.3 else None
        self.unused = nn.Linear(3, 5) if draw.random() < 0.3 else None
        self.head = nn.Linear(width, 11, bias=False)
        if draw.random() < 0.3:
            self.head.weight = self.embedding.weight
        if draw.random() < 0.3:
            self.blocks[0].requires_grad_(draw.random() < 0.3)
        if draw.random() < 0.2:
            self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = x + sum(torch.tanh(part) for part in self.qkv(x).chunk(3, -1))
        if self.conv is not None:
            x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        if self.experts is not None:
            x = x + torch.einsum("btd,edf->btf", x, self.experts)
        return self.head(x if self.scale is None else x * self.scale)


@dataclass(frozen=True)
class Configuration:
    """What one run is made of."""

    seed: int
    num_ranks: int
    options: dict[str, Any]
    kind: str  # Of optimizer that the program makes.
    weight_decay: float
    accumulate: int
    max_norm: float | None

    def module(self) -> Net:
        torch.manual_seed(self.seed)
        return Net(random.Random(self.seed))

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        if self.kind == "SGD":
            return torch.optim.SGD(module.parameters(), lr=_LR, momentum=0.9, weight_decay=self.weight_decay)
        return torch.optim.AdamW(module.parameters(), lr=_LR, eps=_EPS, weight_decay=self.weight_decay)


def _muon(draw: random.Random) -> dict[str, Any]:
    """Arguments of a MuonConfig, few of them wrong."""
    choices: dict[str, Sequence[Any]] = {
        "momentum": [0.0, 0.9, 0.99, 1.5],
        "nesterov": [False],
        "ns_steps": [1, 3, 0],
        "adjust_lr_fn": ["original", "match_rms_adamw"],
        "muon_lr_factor": [1.0, 0.5],
        "fused": [{"qkv.weight": 3}, {"qkv.weight": 2}, {"nothing": 3}],
        "adamw_patterns": [("blocks.0.*",), ("conv.weight",)],
        "muon_patterns": [("head.weight",), ("embedding.weight",), ("scale",)],
        "bucket_bytes": [1, 500],
        "assignment": ["round_robin", "redundant"],
        "dedupe": ["always", "never"],
        "overlap": ["off", "always"],
        "look_ahead": [1, 2, 0],
    }
    named = draw.sample(sorted(choices), draw.randrange(5))
    return {name: draw.choice(choices[name]) for name in named}


def draw_configuration(seed: int) -> Configuration:
    """The configuration of a seed; local."""
    draw = random.Random(1000 + seed)
    kind = draw.choice(["auto", "auto", "muon", "muon", "muon", "nodes", "keep"])
    choices: dict[str, Sequence[Any]] = {
        "replicate_size": [1, 2, 3],
        "shard_size": [1, 2],
        "wrap_policy": [("Linear",), ("Block",), ("Missing",)],
        "reshard_after_forward": [False],
        "reshard_after_backward": [False],
        "bucket_bytes": [1, 300],
        "clip_groups": ["elementwise"],
        "early_all_gather": [True],
        "check_replicas_every_n_steps": [2, -1],
        "context_size": [2],
    }
    options = {name: draw.choice(choices[name]) for name in draw.sample(sorted(choices), draw.randrange(4))}
    options["sharding"] = draw.choice(["fsdp", "fsdp", "fsdp", "zero2", "zero2", "ddp", "none"])
    arguments = _EXACT | (_muon(draw) if kind == "muon" else {})
    if kind == "nodes":
        base = draw.choice(["adamw", "muon"])
        # All components of the momenta of one step: then the update is the mean gradient of all nodes.
        nodes = {"base": base, "replicator": Full(), "decay": 0.0, "value_format": "fp32", "merge": "mean"}
        options |= {"optimizer": {"class": FlexDeMoConfig, **_EXACT, **nodes}}
    else:
        options |= {"optimizer": "keep" if kind == "keep" else {"class": MuonConfig, **arguments}}
    return Configuration(
        seed=seed,
        num_ranks=draw.choice([1, 2, 2, 3, 4, 4]),
        options=options,
        kind="SGD" if kind == "keep" and draw.random() < 0.5 else "AdamW",
        weight_decay=draw.choice([0.0, 0.1]),
        accumulate=draw.choice([1, 1, 2, 3]),
        max_norm=draw.choice([None, None, 0.05]),
    )


def _loss(module: nn.Module, config: Configuration, step: int, index: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * index + rank)
    tokens = torch.randint(11, (2, 4), generator=generator)
    return F.cross_entropy(module(tokens).flatten(0, 1), (3 * tokens.flatten() + 1) % 11) / config.accumulate


def _start(config: Configuration) -> TrainingEngine:
    """Collective over all ranks; every rank must call it."""
    arguments = dict(config.options)
    if isinstance(chosen := arguments["optimizer"], dict):
        arguments["optimizer"] = chosen["class"](**{key: value for key, value in chosen.items() if key != "class"})
    options, module = Options(**arguments), config.module()
    size = dist.get_world_size()
    meshes = options.make("cpu", num_nodes=1, num_processes=size, by_nodes=options.has_nodes)
    silent: Any = lambda _: None  # noqa: E731
    engine = TrainingEngine(module, options, meshes, mode_options=options.mode_options, info=silent, warn=silent)
    engine.shard(torch.device("cpu"))
    engine.attach([config.optimizer(module)], source="the benchmark")
    return engine


def _train(engine: TrainingEngine, config: Configuration) -> dict[str, Tensor]:
    """Whole weights on rank 0. Collective over all ranks; every rank must call it."""
    (optimizer,) = engine.optimizers
    rank = engine.meshes.data_rank
    for step in range(NUM_STEPS):
        for index in range(config.accumulate):
            with engine.no_sync() if index < config.accumulate - 1 else nullcontext():
                with engine.around_forward():
                    loss = _loss(engine.module, config, step, index, rank)
                with engine.around_backward():
                    loss.backward()
        if config.max_norm is not None:
            engine.clip_by_norm(parameters_of(optimizer), config.max_norm)
        engine.step(optimizer, lambda each: each.step())
        optimizer.zero_grad()
    engine.end_training()
    return full_state_dict(engine.module)


def _reference(engine: TrainingEngine, config: Configuration) -> dict[str, Tensor]:
    """The same by this process alone; local."""
    module, used = config.module(), engine.optimizers[0]
    optimizer, elementwise = config.optimizer(module), list(module.parameters())
    if type(used) is not type(optimizer):
        group, names = used.param_groups[0], ("adamw_patterns", "muon_patterns", "fused")
        arguments = {name: group[name] for name in _HYPERPARAMETERS}
        arguments |= {name: getattr(engine.options.config, name) for name in names}
        optimizer = ParallelMuon(module, **_EXACT, **arguments)
        if group["algorithm"] == "adamw":
            optimizer.param_groups[0]["algorithm"] = "adamw"
        elif engine.options.clip_groups == "elementwise":
            routes = zip(elementwise, optimizer.routes, strict=True)
            elementwise = [parameter for parameter, route in routes if route.algorithm == "adamw"]
    num_ranks = engine.meshes.num_data_ranks
    for step in range(NUM_STEPS):
        for index in range(config.accumulate):
            for rank in range(num_ranks):
                (_loss(module, config, step, index, rank) / num_ranks).backward()
        if config.max_norm is not None:
            nn.utils.clip_grad_norm_(elementwise, config.max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return module.state_dict()


def outcome(config: Configuration) -> str:
    """``"equal"``, the ``ValueError`` that refuses it, or a text that begins with ``DEFECT``.

    Collective over all ranks; every rank must call it.
    """
    try:
        engine = _start(config)
    except ValueError as error:
        return f"ValueError: {error}"
    except Exception:
        return f"DEFECT before training: {traceback.format_exc()}"
    try:
        weights, expected = _train(engine, config), _reference(engine, config)
    except Exception:
        return f"DEFECT in training: {traceback.format_exc()}"
    finally:
        engine.close()
    for name, weight in weights.items():
        difference = float((weight.double() - expected[name].double()).abs().max())
        if not difference <= TOLERANCE:
            return f"DEFECT: {name} {tuple(weight.shape)} differs by {difference:.1e} from that of one process"
    return "equal"


def run(seeds: Sequence[int]) -> list[tuple[int, str]]:
    """Outcome of each seed, until the first defect. Collective over all ranks; every rank must call it."""
    found: list[tuple[int, str]] = []
    for seed in seeds:
        own = outcome(draw_configuration(seed))
        outcomes = gather(own, None)
        if len({each.partition(":")[0] for each in outcomes}) > 1:
            own = f"DEFECT: ranks differ: {outcomes}"
        found.append((seed, own))
        if "DEFECT" in own:
            break
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.number)
    counts: Counter[str] = Counter()
    for num_ranks in range(1, 5):
        left = [seed for seed in seeds if draw_configuration(seed).num_ranks == num_ranks]
        while left:
            found: Any = run_on_ranks(run, left, num_ranks=num_ranks)
            for seed, text in found:
                counts[text.partition(":")[0].partition(" ")[0]] += 1
                if "DEFECT" in text:
                    print(f"seed {seed}: {draw_configuration(seed)}\n{text}", flush=True)
            left = left[len(found) :]
        print(f"{num_ranks} ranks done: {dict(counts)}", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
