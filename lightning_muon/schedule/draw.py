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
_CUT = 2.5  # The time axis ends with the longest timeline that is at most so many times as long as the shortest.
_TRANSFERS, _ARITHMETIC = (0.06, 0.30), (0.38, 0.56)  # Top and height of the lanes in a row of height 1.
_MOST_COLUMNS = 8  # Most columns of the legend.
_LETTER_WIDTH = 4.4  # Points, at the size of the labels.


def draw_timelines(timelines: Mapping[str, Timeline], path: Path, *, title: str) -> None:
    """Draw timelines below each other on one time axis, cut off where one is far longer than the shortest.

    Each rank is a row with two lanes, transfers above arithmetic. If there are more than 16 ranks, the busiest, the
    median and the idlest are shown, beside the load of all. ``path`` ends in ``.png``, ``.svg`` or ``.pdf``.
    """
    rows = [rows_shown(timeline) for timeline in timelines.values()]
    has_loads = any(len(timeline.spans) > _MOST_ROWS for timeline in timelines.values())
    lengths = [1e3 * timeline.makespan for timeline in timelines.values() if timeline.makespan]
    axis = _Axis(max(length for length in lengths if length <= _CUT * min(lengths)), 0.7 if has_loads else 0.93)
    least = 3 * _ROW_HEIGHT if has_loads else _LEAST_PANEL
    heights = [max(least, len(each) * _ROW_HEIGHT) + _TITLE_HEIGHT for each in rows]
    figure = import_module("matplotlib.figure").Figure(figsize=(_WIDTH, sum(heights) + 0.9), layout="constrained")
    ratios = {"height_ratios": heights, **({"width_ratios": [4, 1]} if has_loads else {})}
    panels = figure.subplots(len(heights), 2 if has_loads else 1, squeeze=False, gridspec_kw=ratios)
    figure.suptitle(title, fontsize=11, fontweight="bold")
    for (panel, *beside), labels, (name, timeline) in zip(panels, rows, timelines.items(), strict=True):
        _draw_ranks(panel, labels, name, timeline, axis)
        if panel is panels[-1][0]:
            panel.set_xlabel("time (ms)", fontsize=8)
        else:
            panel.set_xticklabels([])
        for of_loads in beside:
            _draw_loads(of_loads, timeline)
    patch = import_module("matplotlib.patches").Patch
    handles = [
        patch(color=style.color, label=f"{style.letter}[i] {style.title}".removeprefix("[i] "))
        for style in (*_STYLES.values(), _OTHER)
        if style in axis.used
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


class _Axis:
    """The common time axis of all panels, and the styles that they use."""

    def __init__(self, end: float, share: float) -> None:
        self.end = end  # Milliseconds.
        self.points_per_ms = 72 * _WIDTH * share / end
        self.used: set[Style] = set()


def _draw_ranks(panel: Any, rows: Mapping[int, str], name: str, timeline: Timeline, axis: _Axis) -> None:
    """Draw the rows of a timeline."""
    for row, rank in enumerate(rows):
        _draw_rank(panel, row, timeline.spans[rank], axis)
    milliseconds, hidden = 1e3 * timeline.makespan, f"communication hidden {timeline.hidden:.1%}"
    duration = f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"
    panel.set_title(f"{name}: {duration}, idle {timeline.idle:.1%}, {hidden}", fontsize=9, loc="left")
    panel.set_xlim(0, axis.end * 1.005)
    panel.set_ylim(len(rows), 0)
    panel.set_yticks([row + 0.5 for row in range(len(rows))], list(rows.values()), fontsize=7)
    panel.tick_params(axis="y", length=0)
    panel.tick_params(axis="x", labelsize=7)
    for row in range(1, len(rows)):
        panel.axhline(row, color="#DDDDDD", linewidth=0.4, zorder=0)
    panel.spines[["top", "right", "left"]].set_visible(False)
    if milliseconds > axis.end * 1.001:
        text = f"goes on until {duration} $\\rightarrow$"
        panel.set_title(text, fontsize=8, loc="right", color="#D55E00")
    else:
        panel.axvline(milliseconds, color="black", linewidth=0.8, linestyle=":")


def _draw_rank(panel: Any, row: int, spans: Sequence[Span], axis: _Axis) -> None:
    """Draw a box for each op, with its name if that fits."""
    boxes: dict[tuple[Style, tuple[float, float]], list[tuple[float, float]]] = {}
    for span in spans:
        start, width = 1e3 * span.start, 1e3 * (span.end - span.start)
        if width <= 0 or start > axis.end:
            continue
        style, lane = _STYLES.get(span.op.kind, _OTHER), _ARITHMETIC if span.op.lane == COMPUTE else _TRANSFERS
        boxes.setdefault((style, lane), []).append((start, width))
        label, middle = f"{style.letter}[{span.op.key}]", row + lane[0] + lane[1] / 2
        if width * axis.points_per_ms > _LETTER_WIDTH * len(label) and start + width <= axis.end * 1.005:
            panel.text(start + width / 2, middle, label, fontsize=6, ha="center", va="center")
    for (style, (top, height)), places in boxes.items():
        axis.used.add(style)
        panel.broken_barh(places, (row + top, height), facecolors=style.color, edgecolors="white", linewidth=0.3)


def _draw_loads(panel: Any, timeline: Timeline) -> None:
    """Draw the load of all ranks, largest first."""
    loads = [each.compute_seconds for each in timeline.ranks.values()]
    mean = sum(loads) / len(loads) or 1.0
    values = [load / mean for load in sorted(loads, reverse=True)]
    panel.stairs(values, baseline=0, fill=True, color=_STYLES[OpKind.NEWTON_SCHULZ].color)
    panel.axhline(1, color="black", linewidth=0.8, linestyle="--")
    panel.set_title("load / mean, all ranks", fontsize=8, loc="left")
    panel.set_ylim(0, 1.1 * max(1.0, *values))
    panel.set_xlim(0, len(values))
    panel.tick_params(labelsize=7)
    panel.spines[["top", "right"]].set_visible(False)
