"""``lightning-muon plan --splits``: ranks divided over pipeline, replicas and shards in every way, and the fastest.

The command and its table. :mod:`lightning_muon.cli.split_rules` says what a split needs and takes,
:mod:`lightning_muon.cli.split_search` goes through all of them.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from torch import nn

from lightning_muon.cli.plan_model import PlannedModel, count, positive, table
from lightning_muon.cli.plan_parts import PlannedParts
from lightning_muon.cli.plan_strategies import Setting
from lightning_muon.cli.split_rules import Job, Split
from lightning_muon.cli.split_search import ACTIVATIONS, GIB, PlannedSplit, Way, plan_splits, unit_of
from lightning_muon.engine.model_setup import SUPPORTED, mixed_precision_policy
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.schedule.pipeline import SCHEDULES

NODE_RANKS = 8  # If nobody says how many ranks a node has.
FLEXDEMO = FlexDeMoConfig(base="muon")  # Of the row, if nobody says another: the optimizer of the other rows.
_SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_v")
_OTHERS = ("pipeline", "draw", "calibrate", "replicate_size", "shard_size")
_LEGEND = (
    "* is the fastest that fits, - does not fit. m: micro-batches; idle: of all ranks, without the optimizer step; "
    "muon: the optimizer step of the slowest stage; GiB, and MB that a rank sends within its node and to other ones: "
    "of the stage with most"
)
_GPU_MEMORY_GIB = 72.0
_MEMORY_HELP = (
    f"that a rank may fill ({_GPU_MEMORY_GIB:g}; with --machine cpu or accelerator: cpu the memory of this host, "
    "divided by the ranks of a node)"
)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--splits", metavar="RANKS", type=count, help="compare pipeline x replicate x shard splits of so many ranks")
    both = parser.add_argument_group("with --ranks and --splits").add_argument
    both("--rows", metavar="N", type=count, help="of a batch of all ranks (2 per rank)")
    both("--length", metavar="N", type=count, default=4096, help="tokens of a row (4096)")
    both("--rank-memory", metavar="GIB", type=positive, help=_MEMORY_HELP)
    both("--model-flops", metavar="X", type=positive, help="FLOP/s of forward and backward (those of Newton-Schulz)")
    both("--width", metavar="N", type=count, help="elements of a token between two layers (the embedding's)")
    both("--schedules", nargs="+", choices=sorted(SCHEDULES), default=_SCHEDULES, help="of pipelines that are tried")
    both("--activations", choices=sorted(ACTIVATIONS), default="auto", help="kept, or recomputed in backward")
    both("--precision", choices=SUPPORTED, help="that of the config, or bf16-mixed")


def refuse_others(arguments: Namespace) -> None:
    """Raise ``ValueError`` for options that ``--splits`` or ``--ranks`` would ignore."""
    ignored = {"splits": (*_OTHERS, "flexdemo", "ranks", "html"), "ranks": _OTHERS}
    for asked, keys in ignored.items():
        for key in keys if getattr(arguments, asked) is not None else ():
            if getattr(arguments, key) not in (None, False, []):
                raise ValueError(f"--{asked} goes without --{key.replace('_', '-')}")


def default_rank_memory(arguments: Namespace, *, is_cpu: bool) -> float:
    """In GiB: of a GPU, or a rank's share of the memory of this host."""
    if not is_cpu:
        return _GPU_MEMORY_GIB
    num_ranks = min(arguments.node_ranks or NODE_RANKS, arguments.splits or arguments.ranks)
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / num_ranks / GIB, 2)


def run(arguments: Namespace, console: Console, setting: Setting, planned: PlannedModel) -> None:
    """Plan all splits and print a table or JSON."""
    precision = arguments.precision or planned.precision or "bf16-mixed"
    job = make_job(arguments, setting, planned, precision, num_ranks=arguments.splits)
    # Simulated programs have no cycles, and to look through millions of ops for some takes a third of the time.
    gc.disable()
    try:
        found, left_out = plan_splits(arguments, job)
    finally:
        gc.enable()
    fitting = [each for each in found if each.fits]
    best = fitting[0] if fitting else None
    if arguments.json:
        splits = [{**each.to_dict(), "recommended": each is best} for each in found]
        options = {"rows": job.rows, "length": job.length, "precision": precision}
        options |= {"rank_memory_gib": arguments.rank_memory, "node_ranks": job.node_ranks}
        content = {"ranks": arguments.splits, **options, "cost": asdict(setting.cost), "splits": splits}
        sys.stdout.write(json.dumps(content) + "\n")
        return
    links = ", ".join(f"{each / 1e9:g}" for each in setting.cost.bandwidth)
    console.print(
        f"{setting.model.name} on {arguments.splits} ranks, {job.node_ranks} per node; {job.rows} rows of "
        f"{job.length} tokens, {precision}",
        f"machine {setting.machine}: {setting.cost.flops_per_second / 1e12:g} TFLOP/s, links {links} GB/s, "
        f"{arguments.rank_memory:g} GiB per rank",
        _table(found, best),
        _LEGEND,
        *left_out,
        "" if best is None else recommendation(best),
        sep="\n",
    )
    if best is None:
        least = min(found, key=lambda each: each.way.total).way
        raise ValueError(
            f"no split fits into {arguments.rank_memory:g} GiB per rank; the smallest, {_sizes(least.split)}, needs "
            f"{least.total / GIB:.1f} GiB. Take more ranks, fewer or shorter rows, or a larger --rank-memory"
        )


def make_job(arguments: Namespace, setting: Setting, planned: PlannedModel, precision: str, *, num_ranks: int) -> Job:
    """What the command line says, and the file."""
    if precision not in SUPPORTED:
        raise ValueError(f"--precision: {precision!r} of the config is none of {', '.join(SUPPORTED)}")
    policy = mixed_precision_policy(precision, planned.module or nn.Module())
    itemsize = 2 if precision == "bf16-true" else 4
    gathered = policy.param_dtype.itemsize if policy.param_dtype else itemsize
    return Job(
        parts=PlannedParts(planned, setting.model, width=arguments.width, itemsize=gathered),
        setting=setting,
        num_ranks=num_ranks,
        node_ranks=arguments.node_ranks or NODE_RANKS,
        rows=arguments.rows or 2 * num_ranks,
        length=arguments.length,
        itemsize=itemsize,
        gathered_itemsize=gathered,
        reduced_itemsize=policy.reduce_dtype.itemsize if policy.reduce_dtype else gathered,
        flops_per_second=arguments.model_flops or setting.cost.flops_per_second,
        flexdemo=planned.flexdemo or FLEXDEMO,
    )


def _sizes(split: Split) -> str:
    return f"{split.pipeline} x {split.replicate} x {split.shard}"


def _table(found: Sequence[PlannedSplit], best: PlannedSplit | None) -> Any:
    columns = {"pipeline": "d", "replicate": "d", "shard": "d", "": "", "way": "", "step s": ",.2f", "idle": ".1%"}
    columns |= {"muon s": ".3f", "GiB": ",.1f", "MB within": ",.0f", "MB between": ",.0f"}
    rows = [
        (
            *(each.way.split.pipeline, each.way.split.replicate, each.way.split.shard),
            "*" if each is best else "" if each.fits else "-",
            each.way.name,
            each.step_seconds,
            each.idle if each.way.schedule else None,
            each.optimizer_seconds,
            each.way.total / GIB,
            each.inside_bytes / 1e6,
            each.between_bytes / 1e6,
        )
        for each in found
    ]
    return table(columns, rows)


def strategy_options(way: Way) -> dict[str, Any]:
    """What to set for it, by the names of a strategy's arguments; a FlexDeMo's ``optimizer`` is not among them."""
    split = way.split
    if split.sharding == "none":
        return {"sharding": "none"}
    found: dict[str, Any] = {"sharding": split.sharding} if not split.is_fsdp else {}
    found |= {"pipeline_size": split.pipeline} if split.pipeline > 1 else {}
    found |= {"replicate_size": split.replicate, "shard_size": split.shard}
    if way.schedule:
        found |= {"pipeline_schedule": way.schedule.name, "pipeline_microbatches": way.microbatches}
    elif way.stays_whole:
        found["reshard_after_forward"] = False
    return found


def recommendation(best: PlannedSplit) -> str:
    """One sentence."""
    way = best.way
    words = [f"{key}={value}" for key, value in strategy_options(way).items()]
    words += ["a FlexDeMo as optimizer"] if way.split.sharding == "flexdemo" else []
    notes = "" if not way.recompute else ", with activation checkpointing"
    if not way.schedule and way.microbatches > 1:
        notes += f", accumulating {way.microbatches} batches"
    unit, size = unit_of(way.total)
    memory = ", ".join(f"{name} {num_bytes / size:.1f}" for name, num_bytes in way.memory.to_dict().items())
    return f"recommended: {', '.join(words)}{notes}; {unit}: {memory}"
