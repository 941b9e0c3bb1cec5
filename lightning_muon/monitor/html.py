"""HTML pages that load no other files: timelines and curves as inline SVG, with tooltips, readable on a phone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from lightning_muon.schedule.draw import style_of
from lightning_muon.schedule.program import COMPUTE, Op
from lightning_muon.schedule.simulate import Span, Timeline

# In units of a picture, which are pixels if it is not scaled.
_WIDTH, _LABELS, _ROW, _AXIS = 960, 130, 20, 30
_LETTER = 6.2  # Width of a letter of the labels.
_CHART_WIDTH, _CHART_HEIGHT, _LEFT, _BOTTOM, _MARGIN = 420, 230, 52, 34, 10
_MOST_POINTS, _MOST_DOTS = 400, 60  # Limits of a curve; more points are thinned out, and dots left out.
# After Okabe and Ito 2008 (https://jfly.uni-koeln.de/color/): color-blind readers can tell them apart.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#A6761D", "#666666", "#A58ADB", "#E7298A")

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.45 system-ui, sans-serif; margin: 0 auto; padding: 0 1rem 2rem; max-width: 1100px; }
h1 { font-size: 1.4rem; } h1, p { overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 1.6rem 0 .4rem; }
.scroll { overflow-x: auto; } .scroll svg { min-width: 640px; }
.grid { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); }
svg { width: 100%; height: auto; display: block; font: 11px system-ui, sans-serif; fill: currentColor; }
figure { margin: 0; } figcaption { font-weight: 600; font-size: .9rem; }
svg rect:hover { stroke: currentColor; stroke-width: 1.5; }
td { overflow-wrap: anywhere; } td:not(.number) { min-width: 4.5em; } td.number { white-space: nowrap; }
table { border-collapse: collapse; font-size: .9rem; } td, th { padding: .2rem .7rem .2rem 0; text-align: left;
  border-bottom: 1px solid #8884; } td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
tr.chosen { font-weight: 700; background: #f0e44255; }
pre { overflow-x: auto; font-size: .8rem; background: #8881; padding: .5rem; }
.legend span { display: inline-block; margin-right: .8rem; font-size: .85rem; }
.legend i { display: inline-block; width: .8rem; height: .8rem; margin-right: .3rem; }
"""


class Bar(NamedTuple):
    """A box of a timeline, from ``start`` to ``end`` in seconds."""

    start: float
    end: float
    label: str  # Written if it fits.
    title: str  # Tooltip; may have several lines.
    color: str


@dataclass(frozen=True, kw_only=True)
class Lane:
    """A row of a timeline; one without boxes is a heading."""

    name: str
    boxes: Sequence[Bar] = ()


def lanes_of(timeline: Timeline, about: Callable[[int, Op], str], ranks: Mapping[int, str]) -> list[Lane]:
    """A lane for each rank and stream of a timeline.

    Args:
        timeline: A measured or a planned one.
        about: Text on an op of a rank, shown after its name and its time.
        ranks: Rank -> name of its lanes; see :func:`.rows_shown`.
    """
    lanes: list[Lane] = []
    for rank, name in ranks.items():
        boxes: dict[str, list[Bar]] = {COMPUTE: []}
        for op, start, end in timeline.spans[rank]:
            style = style_of(op.kind)
            title = f"{op.name}: {_milliseconds(end - start)}, begins at {_milliseconds(start)}\n{about(rank, op)}"
            boxes.setdefault(op.lane, []).append(
                Bar(start, end, f"{style.letter}[{op.key}]", title.rstrip(), style.color)
            )
        name = name.replace("\n", ", ")
        lanes += [Lane(name=f"{name}: {lane}", boxes=each) for lane, each in boxes.items() if each]
    return lanes


def timeline_svg(lanes: Sequence[Lane], end: float = 0.0) -> str:
    """Lanes below each other on one time axis, which ends with the last box, or at ``end`` seconds if that is later."""
    end = max(end, *(box.end for lane in lanes for box in lane.boxes), 1e-9)
    scale, height = (_WIDTH - _LABELS - 10) / end, _ROW * len(lanes)
    parts: list[str] = []
    for row, lane in enumerate(lanes):
        top = row * _ROW
        weight = "" if lane.boxes else ' font-weight="bold"'
        parts.append(f'<text x="0" y="{top + 14}"{weight}>{escape(lane.name)}</text>')
        for box in lane.boxes:
            left, width = _LABELS + box.start * scale, max((box.end - box.start) * scale, 0.5)
            parts.append(
                f'<rect x="{left:.2f}" y="{top + 2}" width="{width:.2f}" height="{_ROW - 4}" fill="{box.color}">'
                f"<title>{escape(box.title)}</title></rect>"
            )
            if width > _LETTER * len(box.label):
                # Labels get no pointer events, so that the box below shows its tooltip.
                place = f'x="{left + width / 2:.2f}" y="{top + 14}" text-anchor="middle" fill="#000"'
                parts.append(f'<text {place} pointer-events="none">{escape(box.label)}</text>')
    for tick in ticks(0, 1e3 * end):
        x = _LABELS + tick / 1e3 * scale
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}" stroke="#8886"/>'
            f'<text x="{x:.1f}" y="{height + 14}" text-anchor="middle">{tick:g}</text>'
        )
    parts.append(f'<text x="{_WIDTH}" y="{height + 27}" text-anchor="end">milliseconds</text>')
    return (
        f'<div class="scroll"><svg viewBox="0 0 {_WIDTH} {height + _AXIS}" role="img" aria-label="timeline">'
        f"{''.join(parts)}</svg></div>"
    )


Points = Sequence[tuple[float, float]]


def curves(title: str, series: Mapping[str, Points], x_axis: str) -> str:
    """A picture of curves by name, with its legend; empty if none has a finite point."""
    finite = {name: [point for point in points if all(map(math.isfinite, point))] for name, points in series.items()}
    finite = {name: points[:: -(-len(points) // _MOST_POINTS)] for name, points in finite.items() if points}
    if not finite:
        return ""
    xs, ys = zip(*(point for points in finite.values() for point in points), strict=True)
    to_x = _scale(min(xs), max(xs), _LEFT, _CHART_WIDTH - _MARGIN)
    to_y = _scale(min(ys), max(ys), _CHART_HEIGHT - _BOTTOM, _MARGIN)
    left, right, bottom = _LEFT, _CHART_WIDTH - _MARGIN, _CHART_HEIGHT - _BOTTOM
    parts = [
        f'<line x1="{left}" x2="{right}" y1="{to_y(y):.1f}" y2="{to_y(y):.1f}" stroke="#8884"/>'
        f'<text x="{left - 5}" y="{to_y(y) + 4:.1f}" text-anchor="end">{y:.4g}</text>'
        for y in ticks(min(ys), max(ys))
    ]
    parts += [
        f'<text x="{to_x(x):.1f}" y="{bottom + 15}" text-anchor="middle">{x:.6g}</text>'
        for x in ticks(min(xs), max(xs))
    ]
    parts.append(f'<text x="{right}" y="{_CHART_HEIGHT - 4}" text-anchor="end">{escape(x_axis)}</text>')
    colors: dict[str, str] = {}
    for number, (name, points) in enumerate(finite.items()):
        color = colors[name] = COLORS[number % len(COLORS)]
        path = " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8"><title>{escape(name)}</title>'
            "</polyline>"
        )
        for x, y in points if len(points) <= _MOST_DOTS else ():
            label = escape(f"{name}: {y:.5g} at {x:.6g} {x_axis}")
            parts.append(
                f'<circle cx="{to_x(x):.1f}" cy="{to_y(y):.1f}" r="2.6" fill="{color}"><title>{label}</title></circle>'
            )
    return _figure(title, _CHART_HEIGHT, parts) + (legend(colors) if len(colors) > 1 else "") + "</figure>"


def bars(title: str, values: Mapping[str, float], unit: str) -> str:
    """A horizontal bar for each value, at least 0."""
    longest, height = max(values.values(), default=0.0) or 1.0, _ROW * len(values)
    parts: list[str] = []
    for row, (name, value) in enumerate(values.items()):
        top, width = row * _ROW, 130 * value / longest
        parts.append(
            f'<text x="0" y="{top + 14}">{escape(name)}</text><rect x="{_LABELS + 30}" y="{top + 3}" '
            f'width="{width:.1f}" height="{_ROW - 6}" fill="{COLORS[0]}"><title>{escape(f"{name}: {value:.5g} {unit}")}'
            f'</title></rect><text x="{_LABELS + 36 + width:.1f}" y="{top + 14}">{value:.4g} {escape(unit)}</text>'
        )
    return _figure(title, height, parts) + "</figure>"


def grid(figures: Sequence[str]) -> str:
    """Pictures in a grid with as many columns as fit; empty if all of them are."""
    return f'<div class="grid">{"".join(figures)}</div>' if any(figures) else ""


def page(title: str, sections: Sequence[tuple[str, str]]) -> str:
    """A whole document from (heading, HTML) pairs; it loads nothing."""
    body = "".join(f"<section><h2>{escape(heading)}</h2>{html}</section>\n" for heading, html in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )


def ticks(low: float, high: float) -> list[float]:
    """Three to eight round numbers from ``low`` to ``high``."""
    if not high > low:
        return [low]
    magnitude = 10.0 ** math.floor(math.log10((high - low) / 3))
    step = max(size for size in (magnitude, 2 * magnitude, 5 * magnitude) if (high - low) / size >= 3 - 1e-9)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def table(header: Sequence[str], rows: Sequence[Sequence[object]], chosen: int | None = None) -> str:
    """A table with numbers aligned right; ``chosen`` is the index of a highlighted row."""

    def cells(values: Sequence[object], tag: str) -> str:
        numbers = ['class="number"' if index in to_the_right else "" for index in range(len(values))]
        return "".join(f"<{tag} {how}>{escape(str(each))}</{tag}>" for each, how in zip(values, numbers, strict=True))

    to_the_right = {
        index for index in range(len(header)) if rows and all(str(row[index])[:1] in "-0123456789" for row in rows)
    }
    body = "".join(
        f"<tr{' class=chosen' if number == chosen else ''}>{cells(row, 'td')}</tr>" for number, row in enumerate(rows)
    )
    return f'<div class="scroll"><table><tr>{cells(header, "th")}</tr>{body}</table></div>'


def legend(colors: Mapping[str, str]) -> str:
    """A legend of colors."""
    entries = (f'<span><i style="background:{color}"></i>{escape(name)}</span>' for name, color in colors.items())
    return f'<p class="legend">{"".join(entries)}</p>'


def legend_of(timelines: Iterable[Iterable[Span]]) -> str:
    """The legend of the ops in some timelines."""
    kinds = {style_of(span.op.kind) for spans in timelines for span in spans}
    return legend({f"{style.letter} {style.title}".strip(): style.color for style in sorted(kinds)})


def paragraphs(texts: Iterable[str]) -> str:
    """A paragraph for each text."""
    return "".join(f"<p>{escape(text)}</p>" for text in texts)


def _figure(title: str, height: float, parts: Sequence[str]) -> str:
    """The beginning of a figure, whose end the caller adds."""
    svg = f'<svg viewBox="0 0 {_CHART_WIDTH} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg}"


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Function from values to positions in a picture."""
    span = high - low or abs(high) or 1.0
    low = low if high > low else low - span / 2
    return lambda value: start + (value - low) / span * (end - start)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
