"""``lightning-muon plan --ranks``: does it fit, and which way of training to use; and a config file of the best one."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_muon.cli.plan_html import pipeline_section, step_section, table_section, write_page
from lightning_muon.cli.plan_model import PlannedModel, count, table
from lightning_muon.cli.plan_splits import make_job, recommendation, strategy_options
from lightning_muon.cli.plan_strategies import Setting
from lightning_muon.cli.split_rules import MODES, Job, simulated_step
from lightning_muon.cli.split_search import GIB, PlannedSplit, pipeline_timeline, plan_modes, unit_of
from lightning_muon.engine.options import Options
from lightning_muon.engine.parsing import read_yaml
from lightning_muon.sharding.modes import MODES as MODES_OF_SHARDING

_STRATEGY = "lightning_muon.ParallelMuonStrategy"
# Options of the strategy that the plan sets, or that would contradict it.
_DECIDED = (
    *("sharding", "replicate_size", "shard_size", "data_parallel_size", "pipeline_size", "pipeline_schedule"),
    *("pipeline_microbatches", "reshard_after_forward"),
)
_LEGEND = (
    "* is recommended; +: so much too large for a rank. split: pipeline x replicas x shards. muon: the optimizer step, "
    "part of the step. The last column has the most at one time, those before it the most of each kind: weights, "
    "gradients, optimizer state, activations, and buffers: gathered weights, what travels, the optimizer at work"
)
_RANKS_HELP = f"compare {', '.join(MODES)} on so many ranks: what fits, and what is fastest"
_WRITE_HELP = (
    "the config of what --ranks recommends: that of --config with another strategy, or with --shapes one for Accelerate"
)
_COLUMNS = {
    "mode": "",
    "split": "",
    "fits": ">",
    "way": "",
    "step s": ".4g",
    "muon s": ".3g",
    **dict.fromkeys(("weights", "grads", "state", "activ.", "buffers"), ".1f"),
}


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--ranks", metavar="N", type=count, help=_RANKS_HELP)
    add("--modes", nargs="+", choices=MODES, default=MODES, help="that --ranks compares")
    add("--write-config", metavar="FILE.yaml", type=Path, help=_WRITE_HELP)


@dataclass(frozen=True, kw_only=True)
class RankedModes:
    """The ways to train, and the recommended one."""

    job: Job
    precision: str
    found: Sequence[PlannedSplit]  # The fastest that fits first.
    left_out: Sequence[str]
    best: PlannedSplit | None  # `None` if nothing fits.


def compare(arguments: Namespace, setting: Setting, planned: PlannedModel) -> RankedModes:
    """Plan each mode. FlexDeMo, which trains in another way, is recommended only where it is asked for."""
    precision = arguments.precision or planned.precision or "bf16-mixed"
    modes, left_out = list(arguments.modes), list[str]()
    try:
        job = make_job(arguments, setting, planned, precision, num_ranks=arguments.ranks)
    except ValueError as error:
        # By the numbers in the names of parameters.
        whole = replace(planned, module=None)
        job = make_job(arguments, setting, whole, precision, num_ranks=arguments.ranks)
        if "pipeline" in modes:
            modes.remove("pipeline")
            reason = str(error).partition("\n")[0].removesuffix(" Write in it:")
            left_out.append(f"pipeline is left out: {reason}")
    found, others = plan_modes(arguments, job, modes)
    candidates = [each for each in found if each.fits]
    if planned.flexdemo is None:
        candidates = [each for each in candidates if each.way.split.mode != "flexdemo"]
    best = candidates[0] if candidates else None
    return RankedModes(job=job, precision=precision, found=found, left_out=[*left_out, *others], best=best)


def run(arguments: Namespace, console: Console, setting: Setting, planned: PlannedModel) -> None:
    """Print the rows, or JSON, and write the files that are asked for."""
    comparison = compare(arguments, setting, planned)
    job, best = comparison.job, comparison.best
    if best is not None and arguments.write_config is not None:
        write_config(arguments, comparison)
    if arguments.html is not None:
        write_html(arguments, comparison)
    if arguments.json:
        options = {"rows": job.rows, "length": job.length, "precision": comparison.precision}
        options |= {"rank_memory_gib": arguments.rank_memory, "node_ranks": job.node_ranks}
        modes = [{**each.to_dict(), "recommended": each is best} for each in comparison.found]
        cost = {**asdict(job.cost), "model_flops_per_second": job.flops_per_second}
        sys.stdout.write(json.dumps({"ranks": job.num_ranks, **options, "cost": cost, "modes": modes}) + "\n")
        return
    console.print(
        *heading(arguments, comparison),
        table(*rows_of_table(arguments, comparison)),
        _LEGEND,
        *comparison.left_out,
        sep="\n",
    )
    if best is None:
        least = min(comparison.found, key=lambda each: each.way.total)
        raise ValueError(
            f"nothing fits into {arguments.rank_memory:g} GiB per rank; {least.way.split.mode} needs least, "
            f"{least.way.total / GIB:.1f} GiB. Take more ranks, fewer or shorter rows, or a larger --rank-memory"
        )
    console.print(recommendation(best), *hints(comparison), sep="\n")


def heading(arguments: Namespace, comparison: RankedModes) -> list[str]:
    """What was asked."""
    job, setting = comparison.job, comparison.job.setting
    links = ", ".join(f"{each / 1e9:g}" for each in job.cost.bandwidth)
    return [
        f"{setting.model.name} on {job.num_ranks} ranks, {job.node_ranks} per node; {job.rows} rows of {job.length} "
        f"tokens, {comparison.precision}",
        f"machine {setting.machine}: {job.cost.flops_per_second / 1e12:g} TFLOP/s, in the model "
        f"{job.flops_per_second / 1e12:g}, links {links} GB/s, {arguments.rank_memory:g} GiB per rank",
    ]


def rows_of_table(arguments: Namespace, comparison: RankedModes) -> tuple[dict[str, str], list[tuple[Any, ...]]]:
    """Columns with their formats, and a row for each mode."""
    rows: list[tuple[Any, ...]] = []
    unit, unit_bytes = unit_of(max(each.way.total for each in comparison.found))
    for each in comparison.found:
        way, split, memory = each.way, each.way.split, each.way.memory
        excess = (way.total - arguments.rank_memory * GIB) / unit_bytes
        name = way.name.removeprefix(split.mode).removeprefix(", ")
        parts = (memory.weights, memory.gradients, memory.optimizer, memory.activations)
        sizes = [size / unit_bytes for size in (*parts, memory.gathered + memory.buffers, memory.peak)]
        fits = "*" if each is comparison.best else "" if each.fits else f"+{excess:.1f}"
        shape = f"{split.pipeline} x {split.replicate} x {split.shard}"
        rows.append((split.mode, shape, fits, name, each.step_seconds, each.optimizer_seconds, *sizes))
    return {**_COLUMNS, unit: ".1f"}, rows


def hints(comparison: RankedModes) -> list[str]:
    """What the recommended row leaves to say."""
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


def write_html(arguments: Namespace, comparison: RankedModes) -> None:
    """The table, and the planned timelines of the recommended row, or of the first one if nothing fits."""
    job, best = comparison.job, comparison.best
    shown = comparison.found[0] if best is None else best
    columns, rows = rows_of_table(arguments, comparison)
    chosen = None if best is None else comparison.found.index(best)
    notes = [*([recommendation(best), *hints(comparison)] if best else []), _LEGEND, *comparison.left_out]
    first, *head = heading(arguments, comparison)
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
    write_page(arguments.html, first, sections)


def write_config(arguments: Namespace, comparison: RankedModes) -> None:
    """The file of the recommended row: that of ``--config`` with its strategy, else one of Accelerate with our section.

    Raises:
        OSError: If there is a file of that name, or no such folder.
    """
    # Imports yaml, which comes with Accelerate and Lightning.
    from lightning_muon.cli.config import accelerate_config, write_new

    assert comparison.best is not None
    way, job = comparison.best.way, comparison.job
    num_ranks = 1 if way.split.mode == "none" else job.num_ranks
    nodes, rest = divmod(num_ranks, job.node_ranks) if num_ranks > job.node_ranks else (1, 0)
    if rest:
        raise ValueError(f"--ranks {num_ranks} fill no nodes of {job.node_ranks} ranks; set --node-ranks")
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


def _lightning_config(arguments: Namespace, comparison: RankedModes, *, devices: int, nodes: int, passes: int) -> str:
    """The file of ``--config`` with another strategy, which keeps the options that the plan leaves open."""
    import yaml

    from lightning_muon.cli.config import plain

    assert comparison.best is not None
    way, job, content = comparison.best.way, comparison.job, read_yaml(arguments.config)
    trainer = dict(content.get("trainer") or {})
    given = trainer.get("strategy")
    arguments_given = (given.get("init_args") or {}) if isinstance(given, dict) else {}
    options = strategy_options(way)
    # Options that only some ways of sharding take.
    takes = () if way.schedule else MODES_OF_SHARDING[options.get("sharding", Options.sharding)].takes
    dropped = {*_DECIDED, *set().union(*(mode.takes for mode in MODES_OF_SHARDING.values())).difference(takes)}
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
