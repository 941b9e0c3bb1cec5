"""Draws timelines: rows are ranks, boxes are ops (G[i] gather, C[i] Newton-Schulz, S[i] scatter, U[i] update).

Needs matplotlib, which is imported when something is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from lightning_muon.schedule.pipeline.nodes import PipelineKind
from lightning_muon.schedule.program import COMPUTE, OpKind
from lightning_muon.schedule.simulate import Span, Timeline


class Style(NamedTuple):
    """How ops of one kind are drawn."""

    letter: str
    title: str
    color: str


# After Okabe and Ito 2008 (https://jfly.uni-koeln.de/color/), whose colors color-blind readers can tell apart; lighter
# where black letters would be hard to read.
_STYLES = {
    OpKind.MOMENTUM: Style("M", "momentum", "#CC79A7"),
    OpKind.GATHER: Style("G", "gather", "#56B4E9"),
    OpKind.NEWTON_SCHULZ: Style("C", "Newton-Schulz", "#E69F00"),
    OpKind.SCATTER: Style("S", "scatter", "#29B98A"),
    OpKind.UPDATE: Style("U", "update", "#F0E442"),
    OpKind.ADAMW: Style("A", "AdamW", "#A58ADB"),
    # Of a pipeline; i is a stage and a micro-batch.
    PipelineKind.FORWARD: Style("F", "forward", "#56B4E9"),
    PipelineKind.BACKWARD: Style("B", "backward", "#29B98A"),
    PipelineKind.BACKWARD_INPUT: Style("I", "backward of inputs", "#29B98A"),
    PipelineKind.BACKWARD_WEIGHT: Style("W", "backward of weights", "#A8DFC8"),
    PipelineKind.ACTIVATION: Style("a", "activation", "#A58ADB"),
    PipelineKind.GRADIENT: Style("g", "gradient", "#CC79A7"),
    PipelineKind.REDUCE_GRAD: Style("R", "reduce gradients", "#D55E00"),
}
_OTHER = Style("", "other", "#D55E00")
_MOST_ROWS = 16  # More ranks than this are summarized.
_WIDTH, _ROW_HEIGHT, _LEAST_PANEL, _TITLE_HEIGHT = 12.0, 0.34, 0.5, 0.42  # Inches.
_TRANSFERS, _ARITHMETIC = (0.06, 0.30), (0.38, 0.56)  # Top and height of the lanes in a row of height 1.
_MOST_COLUMNS = 8  # Most columns of the legend.
_POINTS, _LETTER_WIDTH = 0.93 * 72 * _WIDTH, 4.4  # Points of the time axis, and of a letter of the labels.


def draw_timelines(timelines: Mapping[str, Timeline], path: Path, *, title: str) -> None:
    """Draw timelines below each other on one time axis.

    Each rank is a row with two lanes, transfers above arithmetic. If there are more than 16 ranks, the busiest, the
    median and the idlest are shown. ``path`` ends in ``.png``, ``.svg`` or ``.pdf``.
    """
    rows = [rows_shown(timeline) for timeline in timelines.values()]
    end = 1e3 * max(timeline.makespan for timeline in timelines.values())
    heights = [max(_LEAST_PANEL, len(each) * _ROW_HEIGHT) + _TITLE_HEIGHT for each in rows]
    figure = import_module("matplotlib.figure").Figure(figsize=(_WIDTH, sum(heights) + 0.9), layout="constrained")
    panels = figure.subplots(len(heights), squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights})
    figure.suptitle(title, fontsize=11, fontweight="bold")
    used = set[Style]()
    for (panel,), labels, (name, timeline) in zip(panels, rows, timelines.items(), strict=True):
        used |= _draw_ranks(panel, labels, name, timeline, end)
    panels[-1][0].set_xlabel("time (ms)", fontsize=8)
    patch = import_module("matplotlib.patches").Patch
    handles = [
        patch(color=style.color, label=f"{style.letter}[i] {style.title}".removeprefix("[i] "))
        for style in (*_STYLES.values(), _OTHER)
        if style in used
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(len(handles), _MOST_COLUMNS), fontsize=8, frameon=False
    )
    if path.suffix[1:] not in figure.canvas.get_supported_filetypes():
        raise ValueError(f"{path}: a picture is a .png, .svg or .pdf")
    # Text stays text in an SVG, which keeps it small and searchable, and the same timeline gives the same file.
    settings = {"svg.fonttype": "none", "svg.hashsalt": "lightning-muon", "font.sans-serif": ["DejaVu Sans"]}
    with import_module("matplotlib").rc_context(settings):
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def rows_shown(timeline: Timeline) -> dict[int, str]:
    """Rank -> label of its row: of all if there are few; else of the busiest, the median and the idlest."""
    ranks = sorted(timeline.spans)
    times = ([(span.op.name, span.start, span.end) for span in timeline.spans[rank]] for rank in ranks)
    first = next(times)
    if all(each == first for each in times):
        return {ranks[0]: "each rank"} if len(ranks) > 1 else {ranks[0]: f"rank {ranks[0]}"}
    if len(ranks) <= _MOST_ROWS:
        return {rank: f"rank {rank}" for rank in ranks}
    ordered = sorted(ranks, key=lambda rank: (-timeline.ranks[rank].compute_seconds, rank))
    chosen = {"busiest": ordered[0], "median": ordered[len(ordered) // 2], "idlest": ordered[-1]}
    return {rank: f"{what}\nrank {rank}" for what, rank in chosen.items()}


def _draw_ranks(panel: Any, rows: Mapping[int, str], name: str, timeline: Timeline, end: float) -> set[Style]:
    """Draw the rows of a timeline on a time axis that ends after so many milliseconds; return the styles."""
    used = set[Style]()
    for row, rank in enumerate(rows):
        used |= _draw_rank(panel, row, timeline.spans[rank], end)
    milliseconds, hidden = 1e3 * timeline.makespan, f"communication hidden {timeline.hidden:.1%}"
    duration = f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"
    panel.set_title(f"{name}: {duration}, idle {timeline.idle:.1%}, {hidden}", fontsize=9, loc="left")
    panel.set_xlim(0, end * 1.005)
    panel.set_ylim(len(rows), 0)
    panel.set_yticks([row + 0.5 for row in range(len(rows))], list(rows.values()), fontsize=7)
    panel.tick_params(axis="y", length=0)
    panel.tick_params(axis="x", labelsize=7)
    for row in range(1, len(rows)):
        panel.axhline(row, color="#DDDDDD", linewidth=0.4, zorder=0)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.axvline(milliseconds, color="black", linewidth=0.8, linestyle=":")
    return used


def _draw_rank(panel: Any, row: int, spans: Sequence[Span], end: float) -> set[Style]:
    """Draw a box for each op, with its name if that fits."""
    boxes: dict[tuple[Style, tuple[float, float]], list[tuple[float, float]]] = {}
    for span in spans:
        start, width = 1e3 * span.start, 1e3 * (span.end - span.start)
        if width <= 0:
            continue
        style, lane = _STYLES.get(span.op.kind, _OTHER), _ARITHMETIC if span.op.lane == COMPUTE else _TRANSFERS
        boxes.setdefault((style, lane), []).append((start, width))
        label, middle = f"{style.letter}[{span.op.key}]", row + lane[0] + lane[1] / 2
        if width * _POINTS / end > _LETTER_WIDTH * len(label):
            panel.text(start + width / 2, middle, label, fontsize=6, ha="center", va="center")
    for (style, (top, height)), places in boxes.items():
        panel.broken_barh(places, (row + top, height), facecolors=style.color, edgecolors="white", linewidth=0.3)
    return {style for style, _ in boxes}
