"""A plan as plain text, at most 120 columns wide, and as a dictionary for JSON."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_muon.cli.plan_model import Mesh
from lightning_muon.cli.plan_strategies import GRID, MOST_RANKS_IN_FULL, PIPELINE, Choice, CompareOptions, Outcome
from lightning_muon.grad_sync.reducer import BUCKET_BYTES
from lightning_muon.params.routing import route_of, routing_table
from lightning_muon.schedule.cost import CostModel
from lightning_muon.schedule.estimates import ShardExchange, shard_exchanges
from lightning_muon.schedule.shapes import ModelShapes

WIDTH = 120
_MIB = 2**20
_AXES = ("within a replica", "between replicas")
_DIRECTIONS = ("gather", "scatter")
_GRADIENT_ITEMSIZE = 4  # Of float32 parameters, whose gradients travel in their dtype.


def plan_as_text(
    model: ModelShapes,
    mesh: Mesh,
    options: CompareOptions,
    outcomes: Sequence[Outcome],
    *,
    choice: Choice | None = None,
    slow_links: str = "",
) -> str:
    """All sections.

    Args:
        model: Shapes.
        mesh: Sizes.
        options: Of the plan.
        outcomes: All strategies; none for an optimizer without Newton-Schulz.
        choice: What the config runs, if there is one.
        slow_links: What FlexDeMo sends, if it is the optimizer.
    """
    head = [_title(model, mesh)]
    sections: list[str] = []
    if outcomes:
        head.append(_settings(options, outcomes))
        sections.append(section("Parameters", parameter_table(model)))
    if slow_links:
        sections.append(section("FlexDeMo: what nodes send each other, one step", slow_links))
    if outcomes:
        sections += _newton_schulz(options, outcomes, choice)
    return "\n\n".join(["\n".join(head), *sections]) + "\n"


def _newton_schulz(options: CompareOptions, outcomes: Sequence[Outcome], choice: Choice | None) -> list[str]:
    """Who computes and sends what, and how long that takes."""
    pipeline = _pipeline(outcomes)
    sections = [
        section("Load of Newton-Schulz", _balance(outcomes)),
        section(f"Owners ({PIPELINE})", _owners(pipeline)),
        section("Bytes on the wire, one step", _bytes(outcomes)),
        section("Predicted timeline, without backward", _timelines(outcomes, choice)),
    ]
    if pipeline.ranks.num_ranks > len(pipeline.ranks.specs):
        sections.append(section("More ranks than matrices", _too_many_ranks(outcomes, pipeline, options)))
    notes = [
        textwrap.fill(f"{outcome.name}: {outcome.note}", WIDTH, subsequent_indent="  ")
        for outcome in outcomes
        if outcome.note
    ]
    if notes:
        sections.append(section("Notes", "\n".join(notes)))
    return sections


def parameter_table(model: ModelShapes) -> str:
    """What each parameter is and why; long names are shortened in the middle."""
    text = routing_table([(route_of(p), p.shape, p.frozen) for p in model.parameters])
    lines = text.splitlines()
    column = lines[0].index("  count")
    excess = max(len(line) for line in lines) - WIDTH
    if excess <= 0:
        return text
    width = max(column - excess, 20)
    end = next(index for index in range(2, len(lines)) if set(lines[index]) == {"-"})
    for index in (0, *range(2, end)):
        name = lines[index][:column].rstrip()
        if len(name) > width:
            tail = (width - 3) * 2 // 3
            name = f"{name[: width - 3 - tail]}...{name[-tail:]}"
        lines[index] = name.ljust(width) + lines[index][column:]
    rule = "-" * max(len(lines[index]) for index in (0, *range(2, end)))
    lines[1] = lines[end] = rule
    return "\n".join(lines)


def _title(model: ModelShapes, mesh: Mesh) -> str:
    lines = (
        f"{model.name} on {mesh.replicate} x {mesh.shard} = {mesh.size} ranks (replicate x shard)",
        f"shapes from {model.source}" if model.source else "",
    )
    return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in lines if line)


def _pipeline(outcomes: Sequence[Outcome]) -> Outcome:
    return next(outcome for outcome in outcomes if outcome.name == PIPELINE)


def _settings(options: CompareOptions, outcomes: Sequence[Outcome]) -> str:
    cost, pipeline = options.cost, _pipeline(outcomes)
    links = ", ".join(f"{each / 1e9:g} GB/s" for each in cost.bandwidth)
    latencies = ", ".join(f"{1e6 * each:g}" for each in cost.latency_seconds)
    mean_bytes = sum(pipeline.bucket_bytes) / pipeline.num_buckets
    lines = (
        f"machine: {cost.flops_per_second / 1e12:g} TFLOP/s, links {links} (latency {latencies} us), memory "
        f"{cost.memory_bytes_per_second / 1e9:g} GB/s, {1e6 * cost.op_seconds:g} us per op",
        f"{options.ns_steps} Newton-Schulz steps, {options.wire_itemsize} bytes per element on the wire, buckets of "
        f"{options.chunk_bytes / _MIB:g} MiB per rank, look-ahead {options.look_ahead}",
        f"buckets of {PIPELINE}, which have at least one matrix per rank: {mean_bytes / _MIB:,.1f} MiB per owner on "
        f"average, {max(pipeline.bucket_bytes) / _MIB:,.1f} MiB at most",
    )
    return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in lines)


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


def _flops_unit(loads: Sequence[int]) -> tuple[str, float]:
    return ("TFLOP", 1e12) if max(loads) >= 1e11 else ("GFLOP", 1e9)


def _balance(outcomes: Sequence[Outcome]) -> str:
    rows: list[tuple[str, ...]] = []
    unit, scale = _flops_unit(outcomes[-1].loads)
    for outcome in outcomes:
        most, mean = max(outcome.loads), sum(outcome.loads) / len(outcome.loads)
        rows.append(
            (
                outcome.name,
                f"{most / scale:.2f}",
                f"{mean / scale:.2f}",
                f"{outcome.lower_bound / scale:.2f}",
                f"{most / mean:.3f}",
                f"{most / outcome.lower_bound:.3f}",
                f"{sum(not load for load in outcome.loads)}",
            )
        )
    header = ("strategy", f"busiest {unit}", "mean", "lower bound", "max / mean", "max / bound", "ranks with nothing")
    bound = "The lower bound is the mean load, the dearest matrix, or what cannot leave its rank, whichever is more."
    return f"{table(header, rows)}\n{bound}"


def _owners(outcome: Outcome) -> str:
    owned: dict[int, list[int]] = {rank: [] for rank in range(len(outcome.loads))}
    for matrix, (owner,) in enumerate(outcome.owners):
        owned[owner].append(matrix)
    mean = sum(outcome.loads) / len(outcome.loads)
    unit, scale = _flops_unit(outcome.loads)
    rows: list[tuple[str, ...]] = []
    for label, rank in _ranks_listed(outcome.loads):
        shapes = Counter((outcome.ranks.specs[i].rows, outcome.ranks.specs[i].cols) for i in owned[rank])
        text = ", ".join(f"{count} x {shape}" for shape, count in shapes.most_common())
        load = outcome.loads[rank]
        rows.append((label, str(len(owned[rank])), f"{load / scale:.2f}", f"{load / mean:.3f}", text or "nothing"))
    return _cut(table(("rank", "matrices", unit, "/ mean", "shapes"), rows, left=(0, 4)))


def _ranks_listed(loads: Sequence[int]) -> list[tuple[str, int]]:
    if len(loads) <= MOST_RANKS_IN_FULL:
        return [(str(rank), rank) for rank in range(len(loads))]
    ordered = sorted(range(len(loads)), key=lambda rank: (-loads[rank], rank))
    chosen = {"busiest": ordered[0], "median": ordered[len(ordered) // 2], "idlest": ordered[-1]}
    return [(f"{what} ({rank})", rank) for what, rank in chosen.items()]


def _bytes(outcomes: Sequence[Outcome]) -> str:
    rows = [
        (
            outcome.name,
            each.direction,
            each.axis,
            f"{each.most / _MIB:,.1f}",
            f"{each.total / len(outcome.loads) / _MIB:,.1f}",
            f"{each.floor / len(outcome.loads) / _MIB:,.1f}",
            f"{each.total / each.floor:.3f}" if each.floor else "-",
        )
        for outcome in outcomes
        for each in moved(outcome)
    ]
    if not rows:
        return "Nothing travels."
    return table(
        ("strategy", "direction", "axis", "busiest MiB", "mean MiB", "floor MiB", "/ floor"), rows, left=(0, 1, 2)
    )


def _timelines(outcomes: Sequence[Outcome], choice: Choice | None) -> str:
    rows: list[tuple[str, ...]] = []
    best = min(outcome.timeline.makespan for outcome in outcomes)
    for outcome in outcomes:
        exposed = max(each.exposed_seconds for each in outcome.summaries)
        rows.append(
            (
                f"{outcome.name} *" if choice is not None and outcome.name == choice.row else outcome.name,
                f"{1e3 * outcome.timeline.makespan:,.2f}",
                f"{outcome.timeline.makespan / best:.2f}" if best else "-",
                f"{outcome.timeline.idle:.1%}",
                f"{max(each.idle for each in outcome.summaries):.1%}",
                f"{outcome.timeline.hidden:.1%}",
                f"{1e3 * exposed:,.2f}",
                f"{outcome.timeline.peak_bytes / _MIB:,.0f}",
                str(outcome.num_buckets),
            )
        )
    header = ("strategy", "step ms", "/ best", "idle", "idlest", "hidden", "exposed ms", "buffers MiB", "buckets")
    working = max(outcome.newton_schulz_bytes for outcome in outcomes)
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
        caption.append(textwrap.fill(choice.to_text(), WIDTH))
    return "\n".join([table(header, rows), *caption])


def _too_many_ranks(outcomes: Sequence[Outcome], pipeline: Outcome, options: CompareOptions) -> str:
    specs = pipeline.ranks.specs
    dearest = max(specs, key=lambda spec: spec.flops)
    idle = sum(not load for load in outcomes[-1].loads)
    lines = [
        f"{len(specs)} matrices on {len(outcomes[-1].loads)} ranks: {idle} ranks own nothing, and no step is shorter "
        "than the",
        f"Newton-Schulz of the dearest matrix, {dearest.name} ({dearest.rows}, {dearest.cols}): "
        f"{1e3 * dearest.flops / options.cost.flops_per_second:.2f} ms.",
        "Divide fused weights (--fused 'PATTERN=3') where the parts are matrices of their own.",
    ]
    return "\n".join(lines)


def _cut(text: str) -> str:
    """Lines that are too long end in dots."""
    return "\n".join(line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..." for line in text.splitlines())


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Bytes of one strategy in one direction over one axis."""

    direction: str  # `"gather"` or `"scatter"`.
    axis: str  # Name.
    most: int  # Of the busiest rank, the larger of sent and received.
    total: int  # Sent by all ranks.
    floor: int  # Least total.


def moved(outcome: Outcome) -> list[Moved]:
    """Where and how much a strategy sends, without axes that carry nothing."""
    found: list[Moved] = []
    for direction in _DIRECTIONS:
        for axis, name in enumerate(_AXES):
            # What one rank sends, another receives, so sums of both are equal; the redundant one shows what it gets.
            received = [getattr(rank, f"{direction}_received")[axis] for rank in outcome.bytes]
            sent = [getattr(rank, f"{direction}_sent")[axis] for rank in outcome.bytes]
            floor = getattr(outcome.floor, direction)[axis]
            if any(received) or any(sent):
                most = max(*sent, *received)
                found.append(Moved(direction=direction, axis=name, most=most, total=sum(received), floor=floor))
    return found


def plan_as_dict(
    model: ModelShapes,
    mesh: Mesh,
    options: CompareOptions,
    outcomes: Sequence[Outcome],
    *,
    choice: Choice | None = None,
    slow_links: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything, for ``--json``: seconds, bytes, FLOPs and shares.

    Args:
        model: Shapes.
        mesh: Sizes.
        options: Of the plan.
        outcomes: All strategies; none for an optimizer without Newton-Schulz.
        choice: What the config runs, if there is one.
        slow_links: What FlexDeMo sends, if it is the optimizer.
    """
    base = slow_links["base"] if slow_links and not outcomes else None
    return {
        "model": {
            "name": model.name,
            "source": model.source,
            "parameters": [
                {**asdict(parameter), "algorithm": base or route_of(parameter).algorithm}
                for parameter in model.parameters
            ],
            "matrices": [spec.name for spec in outcomes[0].ranks.specs] if outcomes else [],
        },
        "mesh": {**asdict(mesh), "ranks": mesh.size},
        "options": {**asdict(options), "cost": options.cost.to_dict()},
        "config": choice.to_dict() if choice is not None else None,
        "flexdemo": slow_links,
        "strategies": {outcome.name: _outcome_as_dict(outcome) for outcome in outcomes},
    }


def _outcome_as_dict(outcome: Outcome) -> dict[str, Any]:
    busiest, mean = max(outcome.loads), sum(outcome.loads) / len(outcome.loads)
    is_redundant = any(len(owners) > 1 for owners in outcome.owners)
    return {
        "makespan_seconds": outcome.timeline.makespan,
        "idle": outcome.timeline.idle,
        "idle_of_idlest": max(each.idle for each in outcome.summaries),
        "hidden": outcome.timeline.hidden,
        "exposed_seconds_of_worst": max(each.exposed_seconds for each in outcome.summaries),
        "peak_buffer_bytes": outcome.timeline.peak_bytes,
        "newton_schulz_bytes": outcome.newton_schulz_bytes,
        "early_gathers": {**asdict(outcome.early), "pay": outcome.early.pays} if outcome.early is not None else None,
        "num_buckets": outcome.num_buckets,
        "bucket_bytes": {"mean": sum(outcome.bucket_bytes) / outcome.num_buckets, "max": max(outcome.bucket_bytes)},
        "load": {
            "max_flops": busiest,
            "mean_flops": mean,
            "bound_flops": outcome.lower_bound,
            "max_over_mean": busiest / mean,
            "max_over_bound": busiest / outcome.lower_bound,
            "ranks_without_matrix": sum(not load for load in outcome.loads),
            "flops_of_ranks": list(outcome.loads),
        },
        "owners": "all ranks" if is_redundant else [owner for (owner,) in outcome.owners],
        "bytes": [asdict(each) for each in moved(outcome)],
        "note": outcome.note,
    }


@dataclass(frozen=True, kw_only=True)
class Zero2Plan:
    """All ways of one step."""

    ways: list[ShardExchange]  # Direct, and hierarchical if there is such a way.
    # The faster one. A run chooses by the rates of `h100`, and on a CPU keeps the smallest buckets.
    chosen: ShardExchange

    def to_dict(self) -> list[dict[str, Any]]:
        """Plain numbers, for JSON."""
        return [
            {
                "way": _way(way),
                "is_chosen": way is self.chosen,
                "bucket_bytes": way.bucket_bytes,
                "node_bytes": way.node_bytes,
                "seconds": way.seconds,
            }
            for way in self.ways
        ]

    def to_text(self) -> str:
        """A table, and what it means."""
        rows = [
            (
                f"{_way(way)} *" if way is self.chosen else _way(way),
                f"{way.bucket_bytes / _MIB:,.0f}",
                f"{way.node_bytes / _MIB:,.0f}",
                f"{1e3 * way.seconds:,.1f}",
            )
            for way in self.ways
        ]
        text = table(("way", "bucket MiB", "leaves a node MiB", "transfers and sums ms"), rows)
        return (
            f"{text}\nGradients and values of float32 parameters, per node. * is faster; a run goes by --machine h100."
        )


def plan_zero2(model: ModelShapes, mesh: Mesh, cost: CostModel, *, node_ranks: int) -> Zero2Plan | None:
    """The ways, or nothing where every replica lies on one node.

    Args:
        model: Shapes.
        mesh: Sizes; ranks fill one node after the other.
        cost: The machine.
        node_ranks: Ranks of a node.
    """
    nodes = [
        [(replica * mesh.shard + rank) // node_ranks for rank in range(mesh.shard)] for replica in range(mesh.replicate)
    ]
    num_bytes = _GRADIENT_ITEMSIZE * sum(math.prod(each.shape) for each in model.parameters if not each.frozen)
    if all(len(set(replica)) == 1 for replica in nodes) or not num_bytes:
        return None
    ways = shard_exchanges(nodes, num_bytes, cost, bucket_bytes=BUCKET_BYTES, may_grow=True)
    return Zero2Plan(ways=ways, chosen=min(ways, key=lambda way: way.seconds))


def _way(way: ShardExchange) -> str:
    return "hierarchical" if way.grid else "direct"
