"""What several commands share: types of options, tables, and the memory of this machine."""

from __future__ import annotations

import math
import os
from argparse import ArgumentTypeError
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

_LONGEST_NAME = 80  # Columns of 120.


def count(text: str) -> int:
    """The type of options that are whole numbers from 1 on."""
    value = int(text)
    if value < 1:
        raise ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def positive(text: str) -> float:
    """The type of options that are finite numbers above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"must be finite and above 0, got {value}")
    return value


def memory_of_host() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def table(columns: Mapping[str, str], rows: Iterable[Sequence[Any]]) -> Table:
    """Make a table; ``columns`` are titles with formats: text is left-aligned, numbers right, ``None`` is a dash.

    A column without any text is left out. Cells that are too long are wrapped, those of the first column last.
    """
    cells = [
        ["-" if value is None else format(value, form) for value, form in zip(row, columns.values(), strict=True)]
        for row in rows
    ]
    shown = [(*column,) for column in zip(columns.items(), *cells, strict=True) if any(column[1:])]
    found = Table(box=None, pad_edge=False)
    for index, ((title, form), *column) in enumerate(shown):
        is_whole = index == 0 and max(map(len, column)) <= _LONGEST_NAME
        found.add_column(title, justify="right" if form else "left", overflow="fold", no_wrap=is_whole)
    for row in zip(*(column[1:] for column in shown), strict=True):
        found.add_row(*row)
    return found
