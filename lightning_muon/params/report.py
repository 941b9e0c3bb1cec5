"""The table that says which parameters run on Muon and which on AdamW, and why."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from lightning_muon.params.routing import Route

_HEADER = ("parameter", "count", "shape", "optimizer", "reason", "frozen")
_TITLES = {"muon": "Muon", "adamw": "AdamW"}
Row = tuple[Route, tuple[int, ...], bool]


def routing_table(rows: Sequence[Row]) -> str:
    """Return a plain-text table of all routes, numbered layers collapsed to ``*``, with the totals below.

    Args:
        rows: Route, global shape and "is frozen" of each parameter, in the order to show.
    """
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        route, shape, frozen = row
        key = (_layer_pattern(route.name), shape, route.kind, re.sub(r"\d+", "*", route.reason), frozen)
        groups.setdefault(key, []).append(row)
    lines = [_HEADER, *(_line(group) for group in groups.values())]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
    text = [_join(line, widths) for line in lines]
    rule = "-" * max(len(line) for line in text)
    return "\n".join([text[0], rule, *text[1:], rule, *_totals(rows)])


def _layer_pattern(name: str) -> str:
    """Replace the layer numbers; a number inside a word (``norm1``) is part of a name and stays."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _line(group: Sequence[Row]) -> tuple[str, ...]:
    route, shape, frozen = group[0]
    count = f"x{len(group)}" if len(group) > 1 else ""
    name = _common([row[0].name for row in group])
    reason = _common([row[0].reason for row in group])
    return (name, count, str(shape), _TITLES[route.algorithm], reason, "frozen" if frozen else "")


def _common(texts: Sequence[str]) -> str:
    """Return the texts, which differ in numbers only, as one with ``*`` for the numbers that differ."""
    # The separators are equal in all texts, so the numbers stand at the same odd positions.
    columns = zip(*(re.split(r"(\d+)", text) for text in texts), strict=True)
    return "".join(parts[0] if len(set(parts)) == 1 else "*" for parts in columns)


def _join(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _totals(rows: Sequence[Row]) -> list[str]:
    elements: dict[str, list[int]] = {title: [] for title in (*_TITLES.values(), "frozen")}
    for route, shape, frozen in rows:
        elements["frozen" if frozen else _TITLES[route.algorithm]].append(math.prod(shape))
    total = sum(sum(sizes) for sizes in elements.values())
    return [
        f"{title}: {len(sizes)} tensors, {sum(sizes):,} parameters ({sum(sizes) / max(total, 1):.1%})"
        for title, sizes in elements.items()
        if sizes or title != "frozen"
    ]
