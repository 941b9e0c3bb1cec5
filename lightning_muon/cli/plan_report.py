"""A plan as plain text, at most 120 columns wide."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence

from lightning_muon.cli.plan_choice import Choice
from lightning_muon.cli.plan_data import GramEstimate, gram_estimates, moved
from lightning_muon.cli.plan_specs import Mesh, route_of
from lightning_muon.cli.plan_strategies import GRID, MOST_RANKS_IN_FULL, PIPELINE, Outcome, PlanOptions
from lightning_muon.params.routing import routing_table
from lightning_muon.schedule.shapes import ModelShapes

WIDTH = 120
_MIB = 2**20


def plan_as_text(
    model: ModelShapes,
    mesh: Mesh,
    options: PlanOptions,
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


def _newton_schulz(options: PlanOptions, outcomes: Sequence[Outcome], choice: Choice | None) -> list[str]:
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


def _settings(options: PlanOptions, outcomes: Sequence[Outcome]) -> str:
    cost, pipeline = options.cost, _pipeline(outcomes)
    links = ", ".join(f"{each / 1e9:g} GB/s" for each in cost.bandwidth)
    latencies = ", ".join(f"{1e6 * each:g}" for each in cost.latency_seconds)
    mean_bytes = sum(pipeline.chunk_bytes) / pipeline.num_chunks
    lines = (
        f"machine: {cost.flops_per_second / 1e12:g} TFLOP/s, links {links} (latency {latencies} us), memory "
        f"{cost.memory_bytes_per_second / 1e9:g} GB/s, {1e6 * cost.op_seconds:g} us per op",
        f"{options.ns_steps} Newton-Schulz steps, {options.wire_itemsize} bytes per element on the wire, chunks of "
        f"{options.chunk_bytes / _MIB:g} MiB per rank, look-ahead {options.look_ahead}",
        f"chunks of {PIPELINE}, which have at least one matrix per rank: {mean_bytes / _MIB:,.1f} MiB per owner on "
        f"average, {max(pipeline.chunk_bytes) / _MIB:,.1f} MiB at most",
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
                f"{outcome.idle:.1%}",
                f"{max(each.idle for each in outcome.summaries):.1%}",
                f"{outcome.hidden:.1%}",
                f"{1e3 * exposed:,.2f}",
                f"{outcome.timeline.peak_bytes / _MIB:,.0f}",
                str(outcome.num_chunks),
            )
        )
    header = ("strategy", "step ms", "/ best", "idle", "idlest", "hidden", "exposed ms", "buffers MiB", "chunks")
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


def _too_many_ranks(outcomes: Sequence[Outcome], pipeline: Outcome, options: PlanOptions) -> str:
    specs = pipeline.ranks.specs
    dearest = max(specs, key=lambda spec: spec.flops)
    idle = sum(not load for load in outcomes[-1].loads)
    lines = [
        f"{len(specs)} matrices on {len(outcomes[-1].loads)} ranks: {idle} ranks own nothing, and no step is shorter "
        "than the",
        f"Newton-Schulz of the dearest matrix, {dearest.name} ({dearest.rows}, {dearest.cols}): "
        f"{1e3 * dearest.flops / options.cost.flops_per_second:.2f} ms.",
        "Exact: divide fused weights (--fused 'PATTERN=3') where the parts are matrices of their own.",
        "Not implemented, estimated: iterate on s x s Gram matrices, summed over the pieces (docs/planning.md).",
        "",
        _gram_table(gram_estimates(outcomes, options), min(each.timeline.makespan for each in outcomes)),
    ]
    return "\n".join(lines)


def _gram_table(estimates: Sequence[GramEstimate], best: float) -> str:
    rows = [
        (
            estimate.cost.name,
            f"{estimate.cost.flops / 1e12:.2f}",
            f"{estimate.cost.bytes / _MIB:,.0f}",
            f"{1e3 * estimate.compute_seconds:,.2f}",
            f"{1e3 * estimate.transfer_seconds:,.2f}",
            f"{1e3 * estimate.at_best:,.2f} to {1e3 * estimate.at_worst:,.2f}",
            f"{estimate.at_best / best:.2f} to {estimate.at_worst / best:.2f}",
        )
        for estimate in estimates
    ]
    header = ("Gram variant", "TFLOP", "MiB", "compute ms", "transfer ms", "step ms", "of best strategy")
    return table(header, rows)


def _cut(text: str) -> str:
    """Lines that are too long end in dots."""
    return "\n".join(line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..." for line in text.splitlines())
