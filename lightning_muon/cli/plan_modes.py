"""``lightning-muon plan --ranks`` and ``--splits``: what fits, which way of training to use, and a config file of it.

The command and its table: ``--ranks`` shows the best split of each mode, ``--splits`` every one of FSDP2 and pipelines.
:mod:`lightning_muon.cli.split_rules` computes memory and time of a split, :mod:`lightning_muon.cli.split_search`
searches all of them.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from lightning_muon.cli.plan_html import pipeline_section, step_section, table_section
from lightning_muon.cli.plan_model import PlannedModel
from lightning_muon.cli.plan_parts import PlannedParts
from lightning_muon.cli.plan_strategies import Setting
from lightning_muon.cli.split_rules import TRAINING_MODES, Job, TrainingMode, simulated_step
from lightning_muon.cli.split_search import (
    ACTIVATIONS,
    GIB,
    PlannedSplit,
    Way,
    find_splits,
    pipeline_timeline,
    size_text,
    unit_of,
)
from lightning_muon.cli.table import count, memory_of_host, positive, table
from lightning_muon.engine.model_setup import SUPPORTED, mixed_precision_policy
from lightning_muon.engine.options import Options
from lightning_muon.engine.parsing import read_yaml
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.monitor import html
from lightning_muon.schedule.pipeline import SCHEDULES
from lightning_muon.sharding.modes import MODES

NODE_RANKS = 8  # Default number of ranks of a node.
FLEXDEMO = FlexDeMoConfig(base="muon")  # Default config of the row: the optimizer of the other rows.
SPLIT_MODES: tuple[TrainingMode, ...] = ("fsdp", "hsdp", "pipeline")  # Modes of --splits.
_STRATEGY = "lightning_muon.ParallelMuonStrategy"
# Options of the strategy that the plan sets, or that would contradict it.
_DECIDED = (
    *("sharding", "replicate_size", "shard_size", "data_parallel_size", "pipeline_size", "pipeline_schedule"),
    *("pipeline_microbatches", "reshard_after_forward"),
)
_SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_v")
# Options that --ranks and --splits would ignore, and those that only some ways of planning read.
_REFUSED = ("pipeline", "draw", "calibrate", "replicate_size", "shard_size", "compute_seconds")
_ONLY_WITH = {
    ("ranks",): ("modes",),
    ("ranks", "splits"): (
        *("rows", "length", "rank_memory", "model_flops", "width", "schedules", "activations", "precision"),
        "write_config",
    ),
    ("ranks", "splits", "pipeline"): ("microbatches",),
    ("pipeline",): ("stage_costs", "memory_limit"),
}
_DEFAULTS = {"modes": TRAINING_MODES, "length": 4096, "schedules": _SCHEDULES, "activations": "auto"}
_LEGEND = (
    "* is recommended; +: so much too large for a rank. split: pipeline x replicas x shards. muon: the optimizer step, "
    "part of the step. "
)
_LEGEND_OF_MODES = (
    "The last column has the most at one time, those before it the most of each kind: weights, "
    "gradients, optimizer state, activations, and buffers: gathered weights, what travels, the optimizer at work"
)
_LEGEND_OF_SPLITS = (
    "m: micro-batches; idle: of all ranks, without the optimizer step; MB that a rank sends within its node and to "
    "other ones, and memory: of the stage with most"
)
_RANKS_HELP = f"compare {', '.join(TRAINING_MODES)} on so many ranks: what fits, and what is fastest"
_WRITE_HELP = (
    "the config of what --ranks or --splits recommends: that of --config with another strategy, or with --shapes one "
    "for Accelerate"
)
_GPU_MEMORY_GIB = 72.0
_MEMORY_HELP = (
    f"that a rank may fill ({_GPU_MEMORY_GIB:g}; with --machine cpu or accelerator: cpu the memory of this host, "
    "divided by the ranks of a node)"
)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--ranks", metavar="N", type=count, help=_RANKS_HELP)
    add("--modes", nargs="+", choices=TRAINING_MODES, help="that --ranks compares")
    add("--splits", metavar="RANKS", type=count, help="compare pipeline x replicate x shard splits of so many ranks")
    both = parser.add_argument_group("with --ranks and --splits").add_argument
    both("--rows", metavar="N", type=count, help="of a batch of all ranks (2 per rank)")
    both("--length", metavar="N", type=count, help="tokens of a row (4096)")
    both("--rank-memory", metavar="GIB", type=positive, help=_MEMORY_HELP)
    both("--model-flops", metavar="X", type=positive, help="FLOP/s of forward and backward (those of Newton-Schulz)")
    both("--width", metavar="N", type=count, help="elements of a token between two layers (the embedding's)")
    both("--schedules", nargs="+", choices=sorted(SCHEDULES), help="of pipelines that are tried")
    both("--activations", choices=sorted(ACTIVATIONS), help="kept, or recomputed in backward")
    both("--precision", choices=SUPPORTED, help="that of the config, or bf16-mixed")
    both("--write-config", metavar="FILE.yaml", type=Path, help=_WRITE_HELP)


def complete(arguments: Namespace) -> None:
    """Fill in the defaults; raise ``ValueError`` for options that would be ignored."""
    for asked, keys in {"splits": (*_REFUSED, "flexdemo", "ranks", "modes"), "ranks": _REFUSED}.items():
        for key in keys if getattr(arguments, asked) is not None else ():
            if getattr(arguments, key) not in (None, False, []):
                raise ValueError(f"--{asked} goes without {_option(key)}")
    for ways, keys in _ONLY_WITH.items():
        given = [_option(key) for key in keys if getattr(arguments, key) is not None]
        if given and all(getattr(arguments, way) is None for way in ways):
            instead = "" if arguments.pipeline is None else " in place of --pipeline"
            raise ValueError(
                f"{', '.join(given)} would be ignored without {' or '.join(map(_option, ways))}; add --{ways[0]} N"
                f"{instead}"
            )
    for key, default in _DEFAULTS.items():
        if getattr(arguments, key) is None:
            setattr(arguments, key, default)


def _option(key: str) -> str:
    return f"--{key.replace('_', '-')}"


@dataclass(frozen=True, kw_only=True)
class RankedSplits:
    """The ways to train, and the recommended one."""

    job: Job
    precision: str
    rank_memory: float  # In GiB.
    every_split: bool  # Whether it has all splits, or only the best one of each mode.
    found: Sequence[PlannedSplit]  # The fastest that fits first.
    left_out: Sequence[str]
    best: PlannedSplit | None  # `None` if nothing fits.


def compare(arguments: Namespace, setting: Setting, planned: PlannedModel) -> RankedSplits:
    """Plan each mode. FlexDeMo, which trains in another way, is recommended only if the user asks for it.

    So the config does, ``--flexdemo``, or ``--modes`` with nothing else.
    """
    precision, every_split = arguments.precision or planned.precision or "bf16-mixed", arguments.splits is not None
    num_ranks, left_out = arguments.splits or arguments.ranks, list[str]()
    modes = list(SPLIT_MODES if every_split else dict.fromkeys(arguments.modes))
    if arguments.rank_memory is None:
        share = memory_of_host() / min(arguments.node_ranks or NODE_RANKS, num_ranks)
        arguments.rank_memory = round(share / GIB, 2) if setting.is_cpu else _GPU_MEMORY_GIB
    try:
        job = make_job(arguments, setting, planned, precision, num_ranks=num_ranks)
    except ValueError as error:
        if every_split or set(modes) == {"pipeline"}:
            raise
        # Find layers by the numbers in the names of parameters.
        job = make_job(arguments, setting, replace(planned, module=None), precision, num_ranks=num_ranks)
        if "pipeline" in modes:
            modes.remove("pipeline")
            reason = str(error).partition("\n")[0].removesuffix(". Write in it:")
            left_out.append(f"pipeline is left out: {reason}")
    found, others = find_splits(arguments, job, modes, every_split=every_split, left_out=left_out)
    takes_flexdemo = planned.flexdemo is not None or (not every_split and set(arguments.modes) == {"flexdemo"})
    may_be_best = [each for each in found if each.fits and (takes_flexdemo or each.way.split.mode != "flexdemo")]
    return RankedSplits(
        job=job,
        precision=precision,
        rank_memory=arguments.rank_memory,
        every_split=every_split,
        found=found,
        left_out=others,
        best=may_be_best[0] if may_be_best else None,
    )


def run(arguments: Namespace, console: Console, setting: Setting, planned: PlannedModel) -> None:
    """Print the rows, or JSON, and write the files that are asked for."""
    comparison = compare(arguments, setting, planned)
    job, best = comparison.job, comparison.best
    if best is not None and arguments.write_config is not None:
        write_config(arguments, comparison)
    if arguments.html is not None:
        write_html(arguments.html, comparison)
    if arguments.json:
        content = {
            "ranks": job.num_ranks,
            "rows": job.rows,
            "length": job.length,
            "precision": comparison.precision,
            "rank_memory_gib": comparison.rank_memory,
            "node_ranks": job.node_ranks,
            "cost": {**asdict(job.cost), "model_flops_per_second": job.flops_per_second},
            "splits" if comparison.every_split else "modes": [
                {**each.to_dict(), "recommended": each is best} for each in comparison.found
            ],
        }
        sys.stdout.write(json.dumps(content) + "\n")
        if best is None and arguments.write_config is not None:
            raise ValueError(nothing_recommended(comparison))
        return
    console.print(
        *heading(comparison), table(*rows_of_table(comparison)), legend(comparison), *comparison.left_out, sep="\n"
    )
    if best is None:
        raise ValueError(nothing_recommended(comparison))
    console.print(recommendation(best), *hints(comparison), sep="\n")


def nothing_recommended(comparison: RankedSplits) -> str:
    """Why no row is recommended, and what to do."""
    limit = f"{comparison.rank_memory:g} GiB per rank"
    more = "more ranks, fewer or shorter rows, or a larger --rank-memory"
    if any(each.fits for each in comparison.found):
        return (
            f"only flexdemo fits into {limit}, and it is another optimizer: nodes exchange parts of their momenta (its "
            f"loss: docs/performance.md). Add --flexdemo to have it recommended, or take {more}"
        )
    least = min(comparison.found, key=lambda each: each.way.total).way
    excess = least.total - comparison.rank_memory * GIB
    return (
        f"nothing fits into {limit}; {least.split.mode} needs least, {size_text(least.total)} with "
        f"{least.split.sizes}, which is {size_text(excess)} too much. Take {more}"
    )


def make_job(arguments: Namespace, setting: Setting, planned: PlannedModel, precision: str, *, num_ranks: int) -> Job:
    """Make the job from the command line and the file."""
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


def heading(comparison: RankedSplits) -> list[str]:
    """Lines on what is planned."""
    job, setting = comparison.job, comparison.job.setting
    links = ", ".join(f"{each / 1e9:g}" for each in job.cost.bandwidth)
    return [
        f"{setting.model.name} on {job.num_ranks} ranks, {job.node_ranks} per node; {job.rows} rows of {job.length} "
        f"tokens, {comparison.precision}",
        f"machine {setting.machine}: {job.cost.flops_per_second / 1e12:g} TFLOP/s, in the model "
        f"{job.flops_per_second / 1e12:g}, links {links} GB/s, {comparison.rank_memory:g} GiB per rank",
    ]


def rows_of_table(comparison: RankedSplits) -> tuple[dict[str, str], list[list[Any]]]:
    """Columns with their formats, and a row for each split."""
    unit, unit_bytes = unit_of(max(each.way.total for each in comparison.found))

    def fits(each: PlannedSplit) -> str:
        excess = (each.way.total - comparison.rank_memory * GIB) / unit_bytes
        if each.fits:
            return "*" if each is comparison.best else ""
        return f"+{excess:,.1f}" if excess >= 0.05 else "+<0.1"

    columns: dict[str, tuple[str, Callable[[PlannedSplit], Any]]] = {
        "mode": ("", lambda each: each.way.split.mode),
        "split": ("", lambda each: each.way.split.sizes),
        "fits": (">", fits),
        "way": ("", lambda each: each.way.name.removeprefix(each.way.split.mode).removeprefix(", ")),
        "step s": (".4g", lambda each: each.step_seconds),
        "muon s": (".3g", lambda each: each.optimizer_seconds),
    }
    if comparison.every_split:
        columns["idle"] = (".1%", lambda each: each.idle if each.way.schedule else None)
        columns["MB within"] = (",.0f", lambda each: each.inside_bytes / 1e6)
        columns["MB between"] = (",.0f", lambda each: each.between_bytes / 1e6)
    else:
        columns["weights"] = (".1f", lambda each: each.way.memory.weights / unit_bytes)
        columns["grads"] = (".1f", lambda each: each.way.memory.gradients / unit_bytes)
        columns["state"] = (".1f", lambda each: each.way.memory.optimizer / unit_bytes)
        columns["activ."] = (".1f", lambda each: each.way.memory.activations / unit_bytes)
        columns["buffers"] = (".1f", lambda each: (each.way.memory.gathered + each.way.memory.buffers) / unit_bytes)
    columns[unit] = (".1f", lambda each: each.way.total / unit_bytes)
    rows = [[value(each) for _, value in columns.values()] for each in comparison.found]
    return {title: form for title, (form, _) in columns.items()}, rows


def legend(comparison: RankedSplits) -> str:
    """Legend of the columns."""
    return _LEGEND + (_LEGEND_OF_SPLITS if comparison.every_split else _LEGEND_OF_MODES)


def hints(comparison: RankedSplits) -> list[str]:
    """Further advice on the recommended row."""
    best, found = comparison.best, list[str]()
    assert best is not None
    if best.way.recompute:
        found.append("Turn activation checkpointing on in the model (gradient_checkpointing_enable of transformers).")
    faster = [each for each in comparison.found if each.fits and each.step_seconds < best.step_seconds]
    if faster:
        ratio = best.step_seconds / faster[0].step_seconds
        found.append(
            f"flexdemo is {ratio:.3g} times as fast, and another optimizer: nodes exchange parts of their momenta (its "
            "loss: docs/performance.md). Add --flexdemo to have it recommended."
        )
    return found


def strategy_options(way: Way) -> dict[str, Any]:
    """Arguments of a strategy for this way, by name, without the ``optimizer`` of a FlexDeMo."""
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
    """The recommendation in one sentence."""
    way = best.way
    words = [f"{key}={value}" for key, value in strategy_options(way).items()]
    words += ["a FlexDeMo as optimizer"] if way.split.sharding == "flexdemo" else []
    notes = "" if not way.recompute else ", with activation checkpointing"
    if not way.schedule and way.microbatches > 1:
        notes += f", accumulating {way.microbatches} batches"
    unit, size = unit_of(way.total)
    memory = ", ".join(f"{name} {num_bytes / size:.1f}" for name, num_bytes in way.memory.to_dict().items())
    return f"recommended: {', '.join(words)}{notes}; {unit}: {memory}"


def write_html(path: Path, comparison: RankedSplits) -> None:
    """Write the table, and the planned timelines of the recommended row, or of the first one if nothing fits."""
    job, best = comparison.job, comparison.best
    shown = comparison.found[0] if best is None else best
    columns, rows = rows_of_table(comparison)
    chosen = None if best is None else comparison.found.index(best)
    notes = [*([recommendation(best), *hints(comparison)] if best else []), legend(comparison), *comparison.left_out]
    first, *head = heading(comparison)
    sections = [table_section("What fits, and what is fastest", columns, rows, chosen, [*head, *notes])]
    split, schedule = shown.way.split, shown.way.schedule
    own: tuple[int, ...] = tuple(range(len(job.parts)))
    if schedule is not None:
        sections.append(pipeline_section(pipeline_timeline(job, shown.way)))
        own = schedule.parts_of_ranks[0]
    step = simulated_step(job, [each for part in own for each in job.parts.parameters[part]], split)
    if step is not None:
        where = f"{split.mode}, first stage" if schedule is not None else split.mode
        sections.append(step_section(f"Planned optimizer step: {where}", step))
    path.write_text(html.page(first, sections), encoding="utf-8")


def write_config(arguments: Namespace, comparison: RankedSplits) -> None:
    """Write the config of the recommended row: that of ``--config`` with its strategy, else one for Accelerate.

    Raises:
        OSError: If the file exists, or its folder does not.
    """
    # Imports yaml, which comes with Accelerate and Lightning.
    from lightning_muon.cli.config import accelerate_config, write_new

    assert comparison.best is not None
    way, job = comparison.best.way, comparison.job
    num_ranks = 1 if way.split.mode == "none" else job.num_ranks
    nodes, rest = divmod(num_ranks, job.node_ranks) if num_ranks > job.node_ranks else (1, 0)
    if rest:
        raise ValueError(f"{num_ranks} ranks fill no nodes of {job.node_ranks} ranks; set --node-ranks")
    passes = way.microbatches if way.schedule is None else 1
    rows = -(-job.rows // way.split.data // passes)
    total = rows * way.split.data * passes
    ranks = f"{way.split.data} data ranks" + (f" x {passes} batches" if passes > 1 else "")
    rounding = f", so that {ranks} take {total} rows per step: {job.rows} rounded up" if total > job.rows else ""
    text = (
        f"# {recommendation(comparison.best).partition(';')[0]}\n"
        f"# planned: {comparison.best.step_seconds:.4g} s per step of {job.rows} rows of {job.length} tokens, "
        f"{way.total / GIB:.2f} GiB per rank with {comparison.precision}\n"
        f"# rows of a data rank in a batch: {rows}{rounding}\n"
    )
    if arguments.config is not None:
        text += _lightning_config(arguments, comparison, devices=num_ranks // nodes, nodes=nodes, passes=passes)
    else:
        text += accelerate_config(
            options=strategy_options(way),
            optimizer=job.flexdemo if way.split.mode == "flexdemo" else None,
            num_processes=num_ranks,
            num_machines=nodes,
            mixed_precision="bf16" if comparison.precision == "bf16-mixed" else "no",
            is_cpu=job.setting.is_cpu,
            output=arguments.write_config,
            accumulates=passes,
            checkpoints_activations=way.recompute,
        )
    write_new(arguments.write_config, text)


def _lightning_config(arguments: Namespace, comparison: RankedSplits, *, devices: int, nodes: int, passes: int) -> str:
    """The content of ``--config`` with another strategy, which keeps the options that the plan does not decide."""
    import yaml

    from lightning_muon.cli.config import plain

    assert comparison.best is not None
    way, job, content = comparison.best.way, comparison.job, read_yaml(arguments.config)
    trainer = dict(content.get("trainer") or {})
    given = trainer.get("strategy")
    arguments_given = (given.get("init_args") or {}) if isinstance(given, dict) else {}
    options = strategy_options(way)
    # Options that only some ways of sharding take.
    takes = () if way.schedule else MODES[options.get("sharding", Options.sharding)].takes
    dropped = {*_DECIDED, *set().union(*(mode.takes for mode in MODES.values())).difference(takes)}
    kept = {key: value for key, value in arguments_given.items() if key not in dropped}
    if way.split.mode == "flexdemo":
        kept["optimizer"] = plain(job.flexdemo)
    elif "optimizer" in kept and Options.from_mapping({"optimizer": kept["optimizer"]}).has_nodes:
        del kept["optimizer"]
    trainer |= {"devices": devices, "num_nodes": nodes}
    trainer |= {"precision": arguments.precision} if arguments.precision else {}
    trainer |= {"accumulate_grad_batches": passes} if passes > 1 or "accumulate_grad_batches" in trainer else {}
    trainer["strategy"] = {"class_path": _STRATEGY, "init_args": {**options, **kept}}
    Options.from_mapping(trainer["strategy"]["init_args"], source=str(arguments.write_config))
    return yaml.safe_dump({**content, "trainer": trainer}, sort_keys=False)
