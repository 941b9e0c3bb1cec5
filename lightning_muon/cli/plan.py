"""``lightning-muon plan``: what a step will cost on any number of ranks, without starting one."""

from __future__ import annotations

import gc
import json
import math
import os
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from lightning_muon.cli import plan_modes, plan_pipeline
from lightning_muon.cli.plan_flexdemo import slow_links, slow_links_report
from lightning_muon.cli.plan_html import step_section, table_section
from lightning_muon.cli.plan_model import (
    Mesh,
    PlannedModel,
    add_model_arguments,
    config_from_words,
    read_model,
    with_fused,
    with_stacks_cut_along,
)
from lightning_muon.cli.plan_strategies import GRID, PIPELINE, Outcome, Setting, choice_of, compare_strategies
from lightning_muon.cli.table import count, positive, table
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.grad_sync.reducer import BUCKET_BYTES
from lightning_muon.monitor import html
from lightning_muon.monitor.calibrate import ARITHMETIC, calibrate
from lightning_muon.params.routing import routing_rows, routing_totals
from lightning_muon.schedule.cost import PRESETS, CostModel
from lightning_muon.schedule.draw import draw_timelines, rows_shown
from lightning_muon.schedule.estimates import ShardExchange, shard_exchanges
from lightning_muon.schedule.shapes import write_shapes

MOST_RANKS = 4096
WIDTH = 120
_DESCRIPTION = f"""Show what each parameter is, who owns which matrix, what travels, and how long a step takes with each
strategy. Starts no process and needs no GPU; up to {MOST_RANKS} ranks."""
_MIB = 2**20
_GRADIENT_ITEMSIZE = 4  # Bytes of an element of float32 parameters, whose gradients are sent in their dtype.


def _fused(text: str) -> tuple[str, tuple[int, ...]]:
    pattern, _, sizes = text.rpartition("=")
    if not pattern:
        raise ArgumentTypeError(f"{text!r} is not PATTERN=NUMBER or PATTERN=SIZE,SIZE,...")
    return pattern, tuple(map(count, sizes.split(",")))


# Options that take one value: name, metavar, type and help.
_OPTIONS = (
    ("--stack-shard-dim", "DIM", int, "dimension along which stacks of experts are cut (0)"),
    ("--ns-steps", "N", count, "Newton-Schulz iterations (the config's, or 5)"),
    ("--wire-bytes", "N", count, "bytes of an element that travels (by the config's dtypes, or 2)"),
    ("--chunk-bytes", "N", count, "of what a rank owns of a bucket (the config's)"),
    ("--look-ahead", "N", count, "buckets on their way at a time (the config's)"),
    ("--write-shapes", "FILE.json", Path, "save the shapes of the model"),
    ("--node-ranks", "N", count, "ranks of a node, for sharding=zero2 (8)"),
    ("--cost", "FILE.json", Path, "rates from a file, in place of --machine"),
    ("--flops", "X", positive, "FLOP/s of Newton-Schulz"),
    ("--memory-bandwidth", "X", positive, "bytes/s of elementwise work"),
    ("--bandwidth", "X", positive, "bytes/s of a rank's link (within a replica)"),
    ("--inter-bandwidth", "X", positive, "bytes/s between replicas"),
    ("--latency", "X", float, "seconds of a transfer (within a replica)"),
    ("--html", "FILE.html", Path, "a page with the timeline, its matrices under the pointer, and the table"),
    ("--compute-seconds", "X", positive, "of forward and backward of one step, for the times of FlexDeMo"),
)
# Columns of the timelines: title, format, and function from the numbers of a strategy to the value.
_COLUMNS: tuple[tuple[str, str, Callable[[dict[str, Any]], float]], ...] = (
    ("step ms", ",.2f", lambda found: 1e3 * found["makespan_seconds"]),
    ("load / bound", ".3f", lambda found: found["load"]["max_over_bound"]),
    ("own nothing", "d", lambda found: found["load"]["ranks_without_matrix"]),
    ("idle", ".1%", lambda found: found["idle"]),
    ("hidden", ".1%", lambda found: found["hidden"]),
    ("buffers MiB", ",.0f", lambda found: found["peak_buffer_bytes"] / _MIB),
    ("buckets", "d", lambda found: found["num_buckets"]),
)
_FUSED_HELP = "divide the weights with matching names into N equal matrices, or into parts of sizes N,N,...; repeatable"
_WORDS_HELP = "with these options: replicator=DCTTopK chunk_size=64 top_k=8 value_format=int8 base=adamw"
_CALIBRATE_HELP = "measure this machine, with a process for each rank; takes some 20 seconds"
_PIPELINE_HELP = "compare the schedules of a pipeline of P ranks; of the other options it takes those that say so"
_MACHINE_HELP = "rates to start from (cpu where the config has accelerator: cpu, else reference)"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.description, add = _DESCRIPTION, parser.add_argument
    add_model_arguments(parser).add_argument("--pipeline", metavar="P", type=count, help=_PIPELINE_HELP)
    plan_pipeline.add_arguments(parser)
    plan_modes.add_arguments(parser)
    add("--fused", metavar="PATTERN=N", type=_fused, action="append", default=[], help=_FUSED_HELP)
    add("--flexdemo", metavar="KEY=VALUE", nargs="*", help=f"plan FlexDeMo {_WORDS_HELP}")
    add("--json", action="store_true", help="print everything as JSON instead of text")
    add("--draw", metavar="FILE", type=Path, nargs="+", default=[], help="timelines as .png, .svg or .pdf")
    add("--machine", choices=sorted(PRESETS), help=_MACHINE_HELP)
    add("--calibrate", action="store_true", help=_CALIBRATE_HELP)
    for name, metavar, kind, text in _OPTIONS:
        add(name, metavar=metavar, type=kind, help=text)


def run(arguments: Namespace) -> None:
    """Plan, write the files that are asked for, and print the report."""
    plan_modes.complete(arguments)
    # Simulated programs have no reference cycles; a search for some in millions of ops takes half of the time.
    gc.disable()
    try:
        _run(arguments)
    finally:
        gc.enable()


def _run(arguments: Namespace) -> None:
    if arguments.pipeline is not None:
        plan_pipeline.run(arguments, _console())
        return
    planned = _read(arguments)
    if arguments.splits is not None or arguments.ranks is not None:
        plan_modes.run(arguments, _console(), _setting(arguments, planned, Mesh(1, 1)), planned)
        return
    if arguments.config is None:
        arguments.shard_size = arguments.shard_size or 8
    # An exchange between nodes needs two of them.
    mesh = planned.mesh(arguments, fewest_replicas=1 if planned.flexdemo is None else 2)
    if mesh.size > MOST_RANKS:
        raise ValueError(f"{mesh.replicate} x {mesh.shard} = {mesh.size} ranks are more than {MOST_RANKS}")
    _run_step(arguments, _setting(arguments, planned, mesh), planned.flexdemo)


def _run_step(arguments: Namespace, setting: Setting, flexdemo: FlexDeMoConfig | None) -> None:
    """Plan and show an optimizer step with each strategy, and the exchange between nodes of a FlexDeMo."""
    model, mesh = setting.model, setting.mesh
    links, zero2, choice, outcomes = None, [], None, []
    if flexdemo is not None:
        links = slow_links(model, mesh, flexdemo, compute_seconds=arguments.compute_seconds)
        if flexdemo.base == "muon":
            # Nodes do not share matrices: each divides all of them among its own ranks.
            outcomes = compare_strategies(replace(setting, mesh=mesh._replace(replicate=1)))
    else:
        outcomes = compare_strategies(setting)
        zero2 = zero2_ways(setting, node_ranks=arguments.node_ranks or plan_modes.NODE_RANKS)
        if arguments.config is not None:
            choice = choice_of(setting)
    if arguments.draw and not outcomes:
        raise ValueError("--draw shows the timeline of Newton-Schulz, which FlexDeMo has with base=muon only")
    title = f"{model.name} on {mesh.replicate} x {mesh.shard}"
    for path in arguments.draw:
        draw_timelines({outcome.name: outcome.timeline for outcome in outcomes}, path, title=f"{title} ranks")
    if arguments.html is not None:
        _write_page(arguments.html, f"{title} ranks", setting, outcomes, choice)
    if arguments.json:
        sys.stdout.write(json.dumps(_as_dict(setting, outcomes, choice, links, zero2)) + "\n")
        return
    console = _console()
    console.print(f"{title} = {mesh.size} ranks (replicate x shard)")
    exchange = slow_links_report(links, flexdemo) if links and flexdemo else []
    for heading, body in _report(setting, outcomes, choice, exchange, zero2):
        if heading:
            console.print(f"\n{heading}\n{'=' * len(heading)}", style="bold")
        console.print(*body, sep="\n")


def _read(arguments: Namespace) -> PlannedModel:
    """Read the model and its FlexDeMo, changed by the options; write the shapes if they say so."""
    planned = read_model(arguments)
    flexdemo = planned.flexdemo
    if arguments.flexdemo is not None:
        default = FlexDeMoConfig() if arguments.ranks is None else plan_modes.FLEXDEMO
        flexdemo = config_from_words(arguments.flexdemo, flexdemo or default)
    model = with_fused(planned.shapes, dict(arguments.fused))
    if arguments.stack_shard_dim is not None:
        model = with_stacks_cut_along(model, arguments.stack_shard_dim)
    if arguments.write_shapes is not None:
        write_shapes(model, arguments.write_shapes)
    return replace(planned, shapes=model, flexdemo=flexdemo)


def _as_dict(
    setting: Setting,
    outcomes: Sequence[Outcome],
    choice: Mapping[str, Any] | None,
    links: Mapping[str, Any] | None,
    zero2: Sequence[ShardExchange],
) -> dict[str, Any]:
    """The plan as a dict for JSON."""
    model, mesh = setting.model, setting.mesh
    base = links["base"] if links and not outcomes else None
    parameters = [{**asdict(each), "algorithm": base or each.algorithm} for each in model.parameters]
    return {
        "model": {
            "name": model.name,
            "source": model.source,
            "parameters": parameters,
            "matrices": [spec.name for spec in outcomes[0].specs] if outcomes else [],
        },
        "mesh": {**mesh._asdict(), "ranks": mesh.size},
        "options": vars(setting.config)
        | {"wire_itemsize": setting.wire_itemsize, "machine": setting.machine, "cost": asdict(setting.cost)},
        "config": choice,
        "flexdemo": links,
        "strategies": {outcome.name: outcome.numbers for outcome in outcomes},
        "zero2": [asdict(way) for way in zero2] or None,
    }


def _console() -> Console:
    return Console(width=WIDTH, highlight=False, markup=False, emoji=False)


def _setting(arguments: Namespace, planned: PlannedModel, mesh: Mesh) -> Setting:
    """Options and machine of the file, overridden by those of the command line."""
    machine = arguments.machine or planned.machine
    asked = {key: getattr(arguments, key) for key in ("ns_steps", "chunk_bytes", "look_ahead")}
    config = replace(planned.optimizer, **{key: value for key, value in asked.items() if value is not None})
    cost = PRESETS[machine]
    if arguments.calibrate:
        machine, num_cores = "measured", os.cpu_count() or 1
        if mesh.size > 4 * num_cores:
            raise ValueError(
                f"--calibrate starts a process for each of the {mesh.size} ranks, which is too many for {num_cores} "
                "cores; calibrate on fewer ranks (lightning-muon trace writes cost.json) and hand that over with --cost"
            )
        options = {key: getattr(config, key) for key in ARITHMETIC}
        cost = calibrate(planned.shapes, num_ranks=mesh.size, num_replicas=mesh.replicate, **options)
    elif arguments.cost is not None:
        machine = str(arguments.cost)
        cost = CostModel.read(arguments.cost)
    between = cost.bandwidth[1:] if arguments.inter_bandwidth is None else (arguments.inter_bandwidth,)
    latency = cost.latency_seconds[0] if arguments.latency is None else arguments.latency
    wire_dtype = config.wire_dtype if config.wire_dtype != "auto" else config.compute_dtype
    return Setting(
        model=planned.shapes,
        mesh=mesh,
        config=config,
        wire_itemsize=arguments.wire_bytes or (4 if wire_dtype == "float32" else 2),
        machine=machine,
        is_cpu=arguments.calibrate or (arguments.machine or planned.machine) == "cpu",
        cost=replace(
            cost,
            flops_per_second=arguments.flops or cost.flops_per_second,
            memory_bytes_per_second=arguments.memory_bandwidth or cost.memory_bytes_per_second,
            bandwidth=(arguments.bandwidth or cost.bandwidth[0], *between),
            latency_seconds=(latency, *cost.latency_seconds[1:]),
        ),
    )


def zero2_ways(setting: Setting, *, node_ranks: int) -> list[ShardExchange]:
    """The ways to exchange gradients and values of ZeRO-2; none if every replica is on one node.

    Ranks fill one node after the other. A run chooses by the rates of ``h100``; a CPU keeps the smallest buckets.
    """
    mesh, trained = setting.mesh, [each for each in setting.model.parameters if not each.frozen]
    starts = range(0, mesh.size, mesh.shard)
    nodes = [[rank // node_ranks for rank in range(first, first + mesh.shard)] for first in starts]
    num_bytes = _GRADIENT_ITEMSIZE * sum(math.prod(each.shape) for each in trained)
    if all(len(set(replica)) == 1 for replica in nodes):
        return []
    return shard_exchanges(nodes, num_bytes, setting.cost, bucket_bytes=BUCKET_BYTES, may_grow=True)


def _report(
    setting: Setting,
    outcomes: Sequence[Outcome],
    choice: Mapping[str, Any] | None,
    exchange: list[RenderableType],
    zero2: Sequence[ShardExchange],
) -> Iterator[tuple[str, list[RenderableType]]]:
    """Title and content of each section."""
    model = setting.model
    if model.source:
        yield "", [f"shapes from {model.source}"]
    if outcomes:
        pipeline = next(outcome for outcome in outcomes if outcome.name == PIPELINE)
        yield "", _head(setting, pipeline)
        rows = [(each, each.shape, each.frozen) for each in model.parameters]
        header, *lines = routing_rows(rows)
        yield "Parameters", [table(dict.fromkeys(header, ""), lines), "", *routing_totals(rows)]
    if exchange:
        yield "FlexDeMo: what nodes send each other, one step", exchange
    if outcomes:
        yield f"Owners ({PIPELINE})", [_owners(pipeline)]
        yield "Bytes on the wire, one step", [_bytes(outcomes)]
        yield "Predicted timeline, without backward", _timelines(outcomes, choice)
    if zero2:
        yield "Gradients and values with sharding=zero2, one step", _zero2(zero2)


def _head(setting: Setting, pipeline: Outcome) -> list[RenderableType]:
    cost, config, bucket_bytes = setting.cost, setting.config, pipeline.numbers["bucket_bytes"]
    links = ", ".join(f"{each / 1e9:g} GB/s" for each in cost.bandwidth)
    latencies = ", ".join(f"{1e6 * each:g}" for each in cost.latency_seconds)
    return [
        f"machine {setting.machine}: {cost.flops_per_second / 1e12:g} TFLOP/s, links {links} (latency {latencies} us), "
        f"memory {cost.memory_bytes_per_second / 1e9:g} GB/s, {1e6 * cost.op_seconds:g} us per op",
        f"{config.ns_steps} Newton-Schulz steps, {setting.wire_itemsize} bytes per element on the wire, buckets of "
        f"{config.chunk_bytes / _MIB:g} MiB per rank, look-ahead {config.look_ahead}",
        f"buckets of {PIPELINE}, which have at least one matrix per rank: {bucket_bytes['mean'] / _MIB:,.1f} MiB per "
        f"owner on average, {bucket_bytes['max'] / _MIB:,.1f} MiB at most",
    ]


def _owners(outcome: Outcome) -> RenderableType:
    loads = outcome.plan.flops
    mean = sum(loads) / len(loads)
    rows: list[tuple[Any, ...]] = []
    for rank, label in rows_shown(outcome.timeline).items():
        owned = [spec for spec, owners in zip(outcome.specs, outcome.plan.owners, strict=True) if rank in owners]
        shapes = Counter((spec.rows, spec.cols) for spec in owned)
        text = ", ".join(f"{number} x {shape}" for shape, number in shapes.most_common())
        rows.append((label.replace("\n", " "), len(owned), loads[rank] / 1e12, loads[rank] / mean, text or "nothing"))
    return table({"rank": "", "matrices": "d", "TFLOP": ".3f", "/ mean": ".3f", "shapes": ""}, rows)


def _bytes(outcomes: Sequence[Outcome]) -> RenderableType:
    rows = [
        (
            outcome.name,
            each["direction"],
            each["axis"],
            each["most"] / _MIB,
            each["total"] / len(outcome.plan.flops) / _MIB,
        )
        for outcome in outcomes
        for each in outcome.numbers["bytes"]
    ]
    columns = {"strategy": "", "direction": "", "axis": "", "busiest MiB": ",.1f", "mean MiB": ",.1f"}
    return table(columns, rows) if rows else "Nothing travels."


def _timelines(outcomes: Sequence[Outcome], choice: Mapping[str, Any] | None) -> list[RenderableType]:
    columns = {"strategy": "", **{title: form for title, form, _ in _COLUMNS}}
    chosen = choice["row"] if choice is not None else None
    rows = [
        (f"{each.name} *" if each.name == chosen else each.name, *(value(each.numbers) for *_, value in _COLUMNS))
        for each in outcomes
    ]
    last = outcomes[-1].numbers
    caption = [
        "load: FLOPs of the busiest rank; bound: the mean, the most expensive matrix, or what cannot leave its rank.",
        "idle: share of the step in which a rank does not compute. hidden: share of the transfers that run meanwhile.",
        f"buffers: without the working memory of Newton-Schulz, {last['newton_schulz_bytes'] / _MIB:,.0f} MiB for the "
        "most expensive matrix in 16 bits.",
    ]
    for outcome in outcomes:
        if outcome.name in (PIPELINE, GRID) and outcome.early is not None:
            caption.append(f"overlap=auto on this machine, {outcome.name}: {outcome.early.to_text()}.")
        if outcome.numbers["note"]:
            caption.append(f"{outcome.name}: {outcome.numbers['note']}.")
    if last["load"]["ranks_without_matrix"]:
        caption.append("Ranks that own nothing: divide fused weights (--fused 'PATTERN=3') that are several matrices.")
    if choice is not None:
        shared = "no replicas"
        if choice["num_shared"] is not None:
            shared = f"replicas share {choice['num_shared']} of {choice['num_matrices']} matrices"
        row = "none of these rows" if choice["row"] is None else f"the row {choice['row']!r} (*)"
        caption.append(
            f"The config has assignment={choice['assignment']}, overlap={choice['overlap']}, dedupe={choice['dedupe']} "
            f"({shared}): {row}."
        )
    return [table(columns, rows), *caption]


def _write_page(
    path: Path, title: str, setting: Setting, outcomes: Sequence[Outcome], choice: Mapping[str, Any] | None
) -> None:
    """Write a page with the timeline of the config's strategy, or else of lpt+pipeline, and the table of all."""
    if not outcomes:
        raise ValueError("--html shows the timeline of Newton-Schulz, which FlexDeMo has with base=muon only")
    names = [outcome.name for outcome in outcomes]
    asked = choice["row"] if choice is not None else PIPELINE
    shown = outcomes[names.index(asked if asked is not None else PIPELINE)]
    columns = {"strategy": "", **{title: form for title, form, _ in _COLUMNS}}
    rows = [(each.name, *(value(each.numbers) for *_, value in _COLUMNS)) for each in outcomes]
    chosen = None if asked is None else names.index(asked)
    head = list(map(str, _head(setting, outcomes[names.index(PIPELINE)])))
    sections = [
        table_section("Strategies", columns, rows, chosen, head),
        step_section(f"Predicted optimizer step: {shown.name}", shown),
    ]
    path.write_text(html.page(title, sections), encoding="utf-8")


def _zero2(ways: Sequence[ShardExchange]) -> list[RenderableType]:
    fastest = min(way.seconds for way in ways)
    rows = [
        (
            f"{'hierarchical' if way.grid else 'direct'}{' *' if way.seconds == fastest else ''}",
            way.bucket_bytes / _MIB,
            way.node_bytes / _MIB,
            1e3 * way.seconds,
        )
        for way in ways
    ]
    columns = {"way": "", "bucket MiB": ",.0f", "leaves a node MiB": ",.0f", "transfers and sums ms": ",.1f"}
    caption = "Gradients and values of float32 parameters, per node. * is faster; a run goes by --machine h100."
    return [table(columns, rows), caption]
