"""``lightning-muon plan --html``: the planned timeline with tooltips, and the table of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_muon.cli.plan_strategies import Outcome
from lightning_muon.cli.table import cells_of
from lightning_muon.config import join_names
from lightning_muon.monitor import html
from lightning_muon.schedule.draw import rows_shown
from lightning_muon.schedule.program import Op, OpKind
from lightning_muon.schedule.simulate import Timeline

_MOST_MATRICES = 12  # Most matrices that are named of an op.
_MIB = 2**20
Section = tuple[str, str]  # Heading and HTML.


def table_section(
    heading: str, columns: Mapping[str, str], rows: Sequence[Sequence[Any]], chosen: int | None, notes: Sequence[str]
) -> Section:
    """A table; ``columns`` are titles with the formats of their values, ``chosen`` is the highlighted row."""
    return heading, html.table(list(columns), cells_of(columns, rows), chosen) + html.paragraphs(notes)


def step_section(heading: str, outcome: Outcome) -> Section:
    """An optimizer step; tooltips have the matrices of an op, their owners and their FLOPs."""
    return heading, _timeline(outcome.timeline, _about_matrices(outcome))


def pipeline_section(timeline: Timeline) -> Section:
    """Forwards and backwards of a pipeline."""

    def about(rank: int, op: Op) -> str:
        stage, _, microbatch = op.key.partition(".")
        return f"stage {stage}" + (f", micro-batch {microbatch}" if microbatch else "")

    return "Planned forwards and backwards", _timeline(timeline, about)


def _timeline(timeline: Timeline, about: Callable[[int, Op], str]) -> str:
    ranks = rows_shown(timeline)
    shown = {rank: timeline.spans[rank] for rank in ranks}
    return html.timeline_svg(html.lanes_of(timeline, about, ranks)) + html.legend_of(shown.values())


def _about_matrices(outcome: Outcome) -> Callable[[int, Op], str]:
    plan, specs = outcome.plan, outcome.specs
    stands_for_all = len(rows_shown(outcome.timeline)) == 1

    def about(rank: int, op: Op) -> str:
        size = f"{op.bytes / _MIB:,.2f} MiB"
        if op.kind == OpKind.ADAMW:
            return f"all other parameters, {size} of memory"
        matrices: Sequence[int] = plan.buckets[int(op.key)]
        if op.kind == OpKind.NEWTON_SCHULZ and not stands_for_all:
            # Not the items of the op: ranks that run at equal times share those of the first of them.
            matrices = [each for each in matrices if rank in plan.owners[each]]
        lines: list[str] = []
        for each in matrices:
            spec, owners = specs[each], plan.owners[each]
            owner = f"rank {owners[0]}" if len(owners) == 1 else "all ranks"
            lines.append(f"{spec.name} {spec.rows} x {spec.cols}: {owner}, {spec.flops / 1e9:,.4g} GFLOP")
        title = f"{size}, {op.cost / 1e9:,.4g} GFLOP" if op.cost else size
        return title + "\n" + join_names(lines, _MOST_MATRICES, separator="\n")

    return about
