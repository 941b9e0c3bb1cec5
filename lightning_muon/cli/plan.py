"""``lightning-muon plan``: an optimizer step from shapes, or with ``--ranks`` what fits and what to use."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_muon.cli.plan_fit import GIB, MODES, PRECISIONS, Job, Row, Way, best_rows
from lightning_muon.cli.plan_model import Mesh, PlannedModel, read_config
from lightning_muon.cli.plan_step import Setting, planned_steps, report
from lightning_muon.cli.table import count, memory_of_host, positive, table
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.params.shapes import read_shapes, shipped_shapes
from lightning_muon.pipeline.model import find_staged_model
from lightning_muon.schedule.draw import draw_timelines
from lightning_muon.schedule.simulate import PRESETS, CostModel

WIDTH = 120
MOST_RANKS = 512  # Of an optimizer step, whose program is simulated.
_DESCRIPTION = f"""Without --ranks: what each parameter is, who owns which matrix, and what travels in an optimizer step
and how long it takes, on up to {MOST_RANKS} ranks. With --ranks: which ways of training fit into memory, which one is
fastest, and the line to paste. Starts no process and needs no GPU."""
_NODE_RANKS, _GPU_MEMORY_GIB, _LENGTH, _SHARDS = 8, 72.0, 4096, 8
_FIT_OPTIONS = ("rows", "length", "precision", "rank_memory", "node_ranks", "expert_size", "experts_per_token")
_STEP_OPTIONS = ("replicate_size", "shard_size", "draw")
_LEGEND = (
    "* is recommended; +: so much is missing. split: pipeline x replicas x shards; m: micro-batches. muon: part of the "
    "step. The last column has the most that there is at one time, those before it the most of each kind. buffers: "
    "gathered weights, what travels, and what the optimizer works with."
)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.description = _DESCRIPTION
    add, model = parser.add_argument, parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--config", metavar="FILE.yaml", type=Path, help="a file for lightning-muon fit")
    model.add_argument("--shapes", metavar="FILE.json", help=f"a shape file, or one of: {', '.join(shipped_shapes())}")
    add("--replicate-size", metavar="R", type=count, help="number of replicas (default: the config's, or 1)")
    add("--shard-size", metavar="S", type=count, help="ranks of a replica (default: the config's; 8 for shapes)")
    add("--draw", metavar="FILE", type=Path, nargs="+", help="draw the optimizer step as .png, .svg or .pdf")
    add(
        "--machine",
        choices=sorted(PRESETS),
        help="rates of a rank (default: cpu if the config says so, else reference)",
    )
    add("--cost", metavar="FILE.json", type=Path, help="rates of a rank from a file, in place of those of --machine")
    add("--ranks", metavar="N", type=count, help="compare the ways to train on N ranks")
    fit = parser.add_argument_group("with --ranks").add_argument
    fit("--rows", metavar="N", type=count, help="rows of a step, on all ranks together (default: 2 per rank)")
    fit("--length", metavar="N", type=count, help=f"tokens of a row (default: {_LENGTH})")
    fit("--precision", choices=PRECISIONS, help="precision of the training (default: the config's, or bf16-mixed)")
    fit("--node-ranks", metavar="N", type=count, help=f"ranks of a node (default: {_NODE_RANKS})")
    fit("--experts-per-token", metavar="K", type=count, help="matrices of a stack that a token meets (default: all)")
    fit("--expert-size", metavar="E", type=count, help="ranks that divide whole experts, by transformers (default: 1)")
    help_text = f"(default: {_GPU_MEMORY_GIB:g}; on CPUs that of this host, divided by the ranks of a node)"
    fit("--rank-memory", metavar="GIB", type=positive, help=f"memory that a rank may fill {help_text}")


def run(arguments: Namespace) -> None:
    """Plan, and print the report."""
    ignored = _STEP_OPTIONS if arguments.ranks is not None else _FIT_OPTIONS
    given = [f"--{key.replace('_', '-')}" for key in ignored if getattr(arguments, key) is not None]
    if given:
        goes = "goes without --ranks" if arguments.ranks is not None else "means nothing without --ranks N"
        raise ValueError(f"{', '.join(given)} {goes}")
    from_file = arguments.config is not None
    planned = read_config(arguments.config) if from_file else PlannedModel(shapes=read_shapes(arguments.shapes))
    machine = arguments.machine or planned.machine
    cost = PRESETS[machine] if arguments.cost is None else CostModel.read(arguments.cost)
    setting = Setting(model=planned.shapes, cost=cost, config=planned.optimizer, is_cpu=machine == "cpu")
    console = Console(width=WIDTH, highlight=False, markup=False, emoji=False)
    links = ", ".join(f"{each / 1e9:g}" for each in cost.bandwidth)
    head = (
        f"machine {arguments.cost or machine}: {cost.flops_per_second / 1e12:g} TFLOP/s, links {links} GB/s, memory "
        f"{cost.memory_bytes_per_second / 1e9:g} GB/s"
    )
    if arguments.ranks is not None:
        _fit(arguments, console, setting, planned, head)
    else:
        _step(arguments, console, setting, planned, head)


def _step(arguments: Namespace, console: Console, setting: Setting, planned: PlannedModel, head: str) -> None:
    """Show an optimizer step."""
    shard = arguments.shard_size or planned.shard or (_SHARDS if arguments.config is None else None)
    if shard is None:
        raise ValueError(f"{arguments.config} does not say how many ranks there are; add --shard-size or --ranks")
    mesh, config = Mesh(arguments.replicate_size or planned.replicate or 1, shard), setting.config
    if planned.flexdemo is not None:  # Nodes do not share matrices: each divides all of them among its own ranks.
        if planned.flexdemo.base != "muon":
            raise ValueError(
                f"FlexDeMo with base={planned.flexdemo.base!r} has no Newton-Schulz to plan; add --ranks N"
            )
        mesh = Mesh(1, mesh.shard)
    if mesh.size > MOST_RANKS:
        raise ValueError(f"{mesh.replicate} x {mesh.shard} = {mesh.size} ranks are more than {MOST_RANKS}")
    steps = planned_steps(setting, mesh)
    title = f"{setting.model.name} on {mesh.replicate} x {mesh.shard} = {mesh.size} ranks (replicate x shard)"
    for path in arguments.draw or ():
        draw_timelines({name: step.timeline for name, step in steps.items()}, path, title=title)
    console.print(title, *([f"shapes from {setting.model.source}"] if setting.model.source else []), head, sep="\n")
    console.print(
        f"{config.ns_steps} Newton-Schulz steps, {setting.wire_itemsize} bytes per element on the wire, buckets of "
        f"{config.bucket_bytes / 2**20:g} MiB per rank, look-ahead {config.look_ahead}"
    )
    for heading, body in report(setting.model, steps):
        console.print(f"\n{heading}\n{'=' * len(heading)}", style="bold")
        console.print(*body, sep="\n")


def _fit(arguments: Namespace, console: Console, setting: Setting, planned: PlannedModel, head: str) -> None:
    """Compare the ways to train; FlexDeMo, which is another optimizer, is recommended only if the config has one."""
    job = _job(arguments, setting, planned)
    rows, notes = best_rows(job), list[str]()
    if missing := [mode for mode in MODES if mode not in [row.way.mode for row in rows]]:
        notes.append(f"left out, since ranks, rows, layers or experts cannot be divided so: {', '.join(missing)}")
    if planned.module is not None:
        try:
            find_staged_model(planned.module)
        except ValueError as error:
            rows = [row for row in rows if row.way.mode != "pipeline"]
            notes.append(f"pipeline is left out: {str(error).partition(chr(10))[0]}")
    if not rows:
        raise ValueError("; ".join(notes))
    may_be_best = [row for row in rows if row.fits and (planned.flexdemo or row.way.mode != "flexdemo")]
    best = may_be_best[0] if may_be_best else None
    batch = f"{job.rows} rows of {job.length} tokens, {job.precision}"
    console.print(
        f"{job.model.name} on {job.num_ranks} ranks, {job.node_ranks} per node; {batch}",
        f"{head}, {job.memory_bytes / GIB:g} GiB per rank",
        _fit_table(rows, best, job.memory_bytes),
        _LEGEND,
        *notes,
        sep="\n",
    )
    if best is None:
        raise ValueError(_nothing_fits(rows, job.memory_bytes / GIB))
    if rows[0] is not best:
        ratio = f"flexdemo is {best.seconds / rows[0].seconds:.3g} times as fast, and another optimizer"
        console.print(f"{ratio} (docs/flexdemo.md): {strategy_line(rows[0].way, job.flexdemo)}", soft_wrap=True)
    found = [f"recommended: {best.way.mode}"]
    if best.way.recompute:
        found.append("with activation checkpointing in the model (gradient_checkpointing_enable of transformers)")
    if best.way.passes > 1 and best.way.pipeline == 1:
        found.append(f"with accumulate_grad_batches={best.way.passes} of the Trainer")
    if job.expert_size > 1:
        sizes = f"dp_replicate_size={best.way.replicate}, fsdp_size={best.way.shard}, ep_size={job.expert_size}"
        found.append(f"of a model loaded with DistributedConfig({sizes}) of transformers")
    console.print(", ".join(found), strategy_line(best.way, job.flexdemo), sep="\n", soft_wrap=True)


def _job(arguments: Namespace, setting: Setting, planned: PlannedModel) -> Job:
    """What is planned, by the command line, the file, and the defaults."""
    precision = arguments.precision or planned.precision or "bf16-mixed"
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r} of the config is none of {', '.join(PRECISIONS)}; add --precision")
    experts = [each.shape[0] for each in setting.model.parameters if each.kind == "stack"]
    if (ranks := arguments.expert_size or 1) > 1 and (
        arguments.experts_per_token is None or any(number % ranks for number in experts or [1])
    ):
        raise ValueError(
            f"--expert-size {ranks} takes --experts-per-token, and stacks of experts whose number it divides; this "
            f"model has {', '.join(map(str, sorted(set(experts)))) or 'none'}"
        )
    node_ranks, memory = arguments.node_ranks or _NODE_RANKS, arguments.rank_memory or _GPU_MEMORY_GIB
    if arguments.rank_memory is None and setting.is_cpu:
        memory = round(memory_of_host() / min(node_ranks, arguments.ranks) / GIB, 2)
    return Job(
        **{each.name: getattr(setting, each.name) for each in fields(setting)},
        num_ranks=arguments.ranks,
        node_ranks=node_ranks,
        rows=arguments.rows or 2 * arguments.ranks,
        length=arguments.length or _LENGTH,
        memory_bytes=memory * GIB,
        precision=precision,
        flexdemo=planned.flexdemo or FlexDeMoConfig(),
        expert_size=ranks,
        experts_per_token=arguments.experts_per_token or 0,
    )


def _fit_table(rows: Sequence[Row], best: Row | None, limit: float) -> Any:
    name, unit = ("GiB", GIB) if max(row.memory.peak for row in rows) >= GIB else ("MiB", 2**20)
    columns = {"mode": "", "split": "", "fits": ">", "way": "", "step s": ".4g", "muon s": ".3g"}
    columns |= dict.fromkeys(("weights", "grads", "state", "activ.", "buffers", name), ",.1f")
    cells: list[list[Any]] = []
    for row in rows:
        way = row.way
        passes = f"m={way.passes}" if way.pipeline > 1 else f"{way.passes} passes" if way.passes > 1 else ""
        missing = "*" if row is best else "" if row.fits else f"+{(row.memory.peak - limit) / unit:,.1f}"
        words = ", ".join(filter(None, ("recompute" * way.recompute, passes)))
        split = f"{way.pipeline} x {way.replicate} x {way.shard}"
        cells.append(
            [way.mode, split, missing, words, row.seconds, row.muon_seconds, *(size / unit for size in row.memory)]
        )
    return table(columns, cells)


def _nothing_fits(rows: Sequence[Row], memory: float) -> str:
    """How much is missing, and what to do."""
    least = min(rows, key=lambda row: row.memory.peak)
    way, needed = least.way, least.memory.peak / GIB
    return (
        f"nothing fits into {memory:g} GiB per rank; {way.mode} with {way.pipeline} x {way.replicate} x {way.shard} "
        f"needs least, {needed:.4g} GiB, which is {needed - memory:.3g} GiB too much; take more ranks, fewer or "
        "shorter rows, or a larger --rank-memory"
    )


def strategy_line(way: Way, flexdemo: FlexDeMoConfig) -> str:
    """The strategy that trains this way, as Python; names are those of the package."""
    options: dict[str, Any] = {} if way.is_fsdp else {"sharding": way.mode}
    if way.pipeline > 1:
        options |= {"pipeline_size": way.pipeline, "pipeline_microbatches": way.passes}
    if way.mode != "none":
        options |= {"replicate_size": way.replicate, "shard_size": way.shard}
    words = [f"{key}={value!r}" for key, value in options.items()]
    if way.mode == "flexdemo":
        default = vars(FlexDeMoConfig())
        changed = [f"{key}={value!r}" for key, value in vars(flexdemo).items() if value != default[key]]
        words.append(f"optimizer=FlexDeMoConfig({', '.join(changed)})")
    return f"ParallelMuonStrategy({', '.join(words)})"
