"""A plan as plain text, at most 120 columns wide, and as a dictionary for JSON."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lightning_muon.cli.plan_model import Mesh
from lightning_muon.cli.plan_strategies import GRID, MOST_RANKS_IN_FULL, PIPELINE, CompareOptions, Outcome
from lightning_muon.grad_sync.reducer import BUCKET_BYTES
from lightning_muon.params.routing import route_of, routing_table
from lightning_muon.schedule.cost import CostModel
from lightning_muon.schedule.estimates import shard_exchanges
from lightning_muon.schedule.shapes import ModelShapes

WIDTH = 120
_MIB = 2**20
_GRADIENT_ITEMSIZE = 4  # Of float32 parameters, whose gradients travel in their dtype.


def plan_as_dict(
    model: ModelShapes,
    mesh: Mesh,
    options: CompareOptions,
    outcomes: Sequence[Outcome],
    *,
    choice: Mapping[str, Any] | None = None,
    slow_links: Mapping[str, Any] | None = None,
    zero2: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Everything, for ``--json``; no ``outcomes`` without Newton-Schulz, ``slow_links`` of FlexDeMo only."""
    base = slow_links["base"] if slow_links and not outcomes else None
    return {
        "model": {
            "name": model.name,
            "source": model.source,
            "parameters": [
                {**asdict(each), "algorithm": base or route_of(each).algorithm} for each in model.parameters
            ],
            "matrices": [spec.name for spec in outcomes[0].specs] if outcomes else [],
        },
        "mesh": {**asdict(mesh), "ranks": mesh.size},
        "options": asdict(options),
        "config": choice,
        "flexdemo": slow_links,
        "strategies": {outcome.name: outcome.numbers for outcome in outcomes},
        "zero2": zero2 or None,
    }


def plan_as_text(
    plan: Mapping[str, Any], model: ModelShapes, outcomes: Sequence[Outcome], *, slow_links: str = ""
) -> str:
    """The plan in sections; ``slow_links`` as text."""
    options, mesh = plan["options"], plan["mesh"]
    head = [f"{model.name} on {mesh['replicate']} x {mesh['shard']} = {mesh['ranks']} ranks (replicate x shard)"]
    if model.source:
        head.append(f"shapes from {model.source}")
    sections: list[str] = []
    if outcomes:
        head += _settings(options, outcomes)
        sections.append(section("Parameters", parameter_table(model)))
    if slow_links:
        sections.append(section("FlexDeMo: what nodes send each other, one step", slow_links))
    if outcomes:
        sections += [
            section("Load of Newton-Schulz", _balance(outcomes)),
            section(f"Owners ({PIPELINE})", _owners(_pipeline(outcomes))),
            section("Bytes on the wire, one step", _bytes(outcomes)),
            section("Predicted timeline, without backward", _timelines(outcomes, plan["config"])),
            *_too_many_ranks(outcomes, options["cost"]["flops_per_second"]),
        ]
        notes = [fill(f"{each.name}: {each.numbers['note']}") for each in outcomes if each.numbers["note"]]
        if notes:
            sections.append(section("Notes", "\n".join(notes)))
    if plan["zero2"]:
        sections.append(section("Gradients and values with sharding=zero2, one step", _zero2(plan["zero2"])))
    return "\n\n".join(["\n".join(map(fill, head)), *sections]) + "\n"


def fill(line: str) -> str:
    """The line, broken at the width of the report."""
    return textwrap.fill(line, WIDTH, subsequent_indent="  ")


def section(title: str, body: str) -> str:
    """A title, underlined, and what belongs to it."""
    return f"{title}\n{'=' * len(title)}\n{body}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)) -> str:
    """Columns with two spaces between; those in ``left`` begin at the left, the others end at the right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def parameter_table(model: ModelShapes) -> str:
    """What each parameter is and why; long names are shortened in the middle."""
    text = routing_table([(route_of(p), p.shape, p.frozen) for p in model.parameters])
    lines = text.splitlines()
    column = lines[0].index("  count")
    excess = max(len(line) for line in lines) - WIDTH
    if excess <= 0:
        return text
    width = max(column - excess, 20)
    rule = lines.index(lines[1], 2)
    named = (0, *range(2, rule))
    for index in named:
        name = lines[index][:column].rstrip()
        if len(name) > width:
            tail = (width - 3) * 2 // 3
            name = f"{name[: width - 3 - tail]}...{name[-tail:]}"
        lines[index] = name.ljust(width) + lines[index][column:]
    lines[1] = lines[rule] = "-" * max(len(lines[index]) for index in named)
    return "\n".join(lines)


def _pipeline(outcomes: Sequence[Outcome]) -> Outcome:
    return next(outcome for outcome in outcomes if outcome.name == PIPELINE)


def _settings(options: Mapping[str, Any], outcomes: Sequence[Outcome]) -> list[str]:
    cost, bucket_bytes = options["cost"], _pipeline(outcomes).numbers["bucket_bytes"]
    links = ", ".join(f"{each / 1e9:g} GB/s" for each in cost["bandwidth"])
    latencies = ", ".join(f"{1e6 * each:g}" for each in cost["latency_seconds"])
    return [
        f"machine: {cost['flops_per_second'] / 1e12:g} TFLOP/s, links {links} (latency {latencies} us), memory "
        f"{cost['memory_bytes_per_second'] / 1e9:g} GB/s, {1e6 * cost['op_seconds']:g} us per op",
        f"{options['ns_steps']} Newton-Schulz steps, {options['wire_itemsize']} bytes per element on the wire, buckets "
        f"of {options['chunk_bytes'] / _MIB:g} MiB per rank, look-ahead {options['look_ahead']}",
        f"buckets of {PIPELINE}, which have at least one matrix per rank: {bucket_bytes['mean'] / _MIB:,.1f} MiB per "
        f"owner on average, {bucket_bytes['max'] / _MIB:,.1f} MiB at most",
    ]


def _flops_unit(loads: Sequence[int]) -> tuple[str, float]:
    return ("TFLOP", 1e12) if max(loads) >= 1e11 else ("GFLOP", 1e9)


def _balance(outcomes: Sequence[Outcome]) -> str:
    unit, scale = _flops_unit(outcomes[-1].plan.flops)
    rows = [
        (
            outcome.name,
            *(f"{load[key] / scale:.2f}" for key in ("max_flops", "mean_flops", "bound_flops")),
            *(f"{load[key]:.3f}" for key in ("max_over_mean", "max_over_bound")),
            str(load["ranks_without_matrix"]),
        )
        for outcome in outcomes
        for load in [outcome.numbers["load"]]
    ]
    header = ("strategy", f"busiest {unit}", "mean", "lower bound", "max / mean", "max / bound", "ranks with nothing")
    bound = "The lower bound is the mean load, the dearest matrix, or what cannot leave its rank, whichever is more."
    return f"{table(header, rows)}\n{bound}"


def _owners(outcome: Outcome) -> str:
    loads, specs = outcome.plan.flops, outcome.specs
    unit, scale = _flops_unit(loads)
    mean = outcome.numbers["load"]["mean_flops"]
    labels = {rank: str(rank) for rank in range(len(loads))}
    if len(loads) > MOST_RANKS_IN_FULL:
        ordered = sorted(labels, key=lambda rank: (-loads[rank], rank))
        chosen = {"busiest": ordered[0], "median": ordered[len(ordered) // 2], "idlest": ordered[-1]}
        labels = {rank: f"{what} ({rank})" for what, rank in chosen.items()}
    rows: list[tuple[str, ...]] = []
    for rank, label in labels.items():
        owned = [spec for spec, owners in zip(specs, outcome.plan.owners, strict=True) if rank in owners]
        shapes = Counter((spec.rows, spec.cols) for spec in owned)
        text = ", ".join(f"{count} x {shape}" for shape, count in shapes.most_common())
        load = loads[rank]
        rows.append((label, str(len(owned)), f"{load / scale:.2f}", f"{load / mean:.3f}", text or "nothing"))
    text = table(("rank", "matrices", unit, "/ mean", "shapes"), rows, left=(0, 4))
    return "\n".join(line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..." for line in text.splitlines())


def _bytes(outcomes: Sequence[Outcome]) -> str:
    rows = [
        (
            outcome.name,
            each["direction"],
            each["axis"],
            f"{each['most'] / _MIB:,.1f}",
            f"{each['total'] / len(outcome.plan.flops) / _MIB:,.1f}",
            f"{each['floor'] / len(outcome.plan.flops) / _MIB:,.1f}",
            f"{each['total'] / each['floor']:.3f}" if each["floor"] else "-",
        )
        for outcome in outcomes
        for each in outcome.numbers["bytes"]
    ]
    header = ("strategy", "direction", "axis", "busiest MiB", "mean MiB", "floor MiB", "/ floor")
    return table(header, rows, left=(0, 1, 2)) if rows else "Nothing travels."


def _timelines(outcomes: Sequence[Outcome], choice: Mapping[str, Any] | None) -> str:
    best = min(outcome.numbers["makespan_seconds"] for outcome in outcomes)
    rows = [
        (
            f"{outcome.name} *" if choice is not None and outcome.name == choice["row"] else outcome.name,
            f"{1e3 * found['makespan_seconds']:,.2f}",
            f"{found['makespan_seconds'] / best:.2f}" if best else "-",
            *(f"{found[key]:.1%}" for key in ("idle", "idle_of_idlest", "hidden")),
            f"{1e3 * found['exposed_seconds_of_worst']:,.2f}",
            f"{found['peak_buffer_bytes'] / _MIB:,.0f}",
            str(found["num_buckets"]),
        )
        for outcome in outcomes
        for found in [outcome.numbers]
    ]
    header = ("strategy", "step ms", "/ best", "idle", "idlest", "hidden", "exposed ms", "buffers MiB", "buckets")
    working = max(outcome.numbers["newton_schulz_bytes"] for outcome in outcomes)
    caption = [
        "idle: share of the step in which a rank does not compute. hidden: share of the transfers that run meanwhile.",
        f"buffers: without the working memory of Newton-Schulz, {working / _MIB:,.0f} MiB for the dearest matrix in 16 "
        "bits.",
    ]
    caption += [
        textwrap.fill(f"overlap=auto on this machine, {outcome.name}: {outcome.early.to_text()}.", WIDTH)
        for outcome in outcomes
        if outcome.name in (PIPELINE, GRID) and outcome.early is not None
    ]
    if choice is not None:
        shared = "no replicas"
        if choice["num_shared"] is not None:
            shared = f"replicas share {choice['num_shared']} of {choice['num_matrices']} matrices"
        row = "none of these rows" if choice["row"] is None else f"the row {choice['row']!r} (*)"
        runs = (
            f"The config has assignment={choice['assignment']}, overlap={choice['overlap']}, dedupe={choice['dedupe']} "
            f"({shared}): {row}."
        )
        caption.append(textwrap.fill(runs, WIDTH))
    return "\n".join([table(header, rows), *caption])


def _too_many_ranks(outcomes: Sequence[Outcome], flops_per_second: float) -> list[str]:
    pipeline, last = _pipeline(outcomes), outcomes[-1]
    specs = pipeline.specs
    if len(pipeline.plan.flops) <= len(specs):
        return []
    dearest = max(specs, key=lambda spec: spec.flops)
    idle = last.numbers["load"]["ranks_without_matrix"]
    lines = [
        f"{len(specs)} matrices on {len(last.plan.flops)} ranks: {idle} ranks own nothing, and no step is shorter "
        "than the",
        f"Newton-Schulz of the dearest matrix, {dearest.name} ({dearest.rows}, {dearest.cols}): "
        f"{1e3 * dearest.flops / flops_per_second:.2f} ms.",
        "Divide fused weights (--fused 'PATTERN=3') where the parts are matrices of their own.",
    ]
    return [section("More ranks than matrices", "\n".join(lines))]


def zero2_ways(model: ModelShapes, mesh: Mesh, cost: CostModel, *, node_ranks: int) -> list[dict[str, Any]]:
    """The ways of ZeRO-2's gradients and values, for JSON; nothing where every replica lies on one node.

    Ranks fill one node after the other. A run chooses by the rates of ``h100``; a CPU keeps the smallest buckets.
    """
    nodes = [
        [(replica * mesh.shard + rank) // node_ranks for rank in range(mesh.shard)] for replica in range(mesh.replicate)
    ]
    num_bytes = _GRADIENT_ITEMSIZE * sum(math.prod(each.shape) for each in model.parameters if not each.frozen)
    if all(len(set(replica)) == 1 for replica in nodes) or not num_bytes:
        return []
    ways = shard_exchanges(nodes, num_bytes, cost, bucket_bytes=BUCKET_BYTES, may_grow=True)
    chosen = min(ways, key=lambda way: way.seconds)
    return [
        {
            "way": "hierarchical" if way.grid else "direct",
            "is_chosen": way is chosen,
            "bucket_bytes": way.bucket_bytes,
            "node_bytes": way.node_bytes,
            "seconds": way.seconds,
        }
        for way in ways
    ]


def _zero2(ways: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            f"{way['way']} *" if way["is_chosen"] else way["way"],
            f"{way['bucket_bytes'] / _MIB:,.0f}",
            f"{way['node_bytes'] / _MIB:,.0f}",
            f"{1e3 * way['seconds']:,.1f}",
        )
        for way in ways
    ]
    text = table(("way", "bucket MiB", "leaves a node MiB", "transfers and sums ms"), rows)
    return f"{text}\nGradients and values of float32 parameters, per node. * is faster; a run goes by --machine h100."
