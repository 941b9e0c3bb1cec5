"""Orders as CSV, in the format ``compute_only`` that torch's pipeline runtime reads and writes.

A row per rank, a cell per node: ``2F0`` is the forward of micro-batch 0 in stage 2. Empty cells, with which torch marks
bubbles, mean nothing.
"""

from __future__ import annotations

import csv
import io
import re

from lightning_muon.schedule.pipeline.nodes import Node, Order

_CELL = re.compile(r"(\d+)([FBIW])(\d+)")
# What torch writes for a forward and a backward that may run as one.
_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")


def order_to_csv(order: Order) -> str:
    """The text of such a file."""
    text = io.StringIO()
    csv.writer(text).writerows(order)
    return text.getvalue()


def order_from_csv(text: str) -> Order:
    """From the text of such a file; pairs that may overlap become one after the other."""
    rows = csv.reader(io.StringIO(text))
    return [[node for cell in row for node in _parse(cell.strip(), rank)] for rank, row in enumerate(rows)]


def _parse(cell: str, rank: int) -> list[Node]:
    if not cell:
        return []
    if pair := _PAIR.fullmatch(cell):
        return [node for part in pair[1].split(";") for node in _parse(part.strip(), rank)]
    if not (match := _CELL.fullmatch(cell)):
        raise ValueError(
            f"row {rank} has {cell!r}; a cell is a stage, one of F, B, I and W, and a micro-batch, for example 2F0"
        )
    return [Node(int(match[1]), match[2], int(match[3]))]
