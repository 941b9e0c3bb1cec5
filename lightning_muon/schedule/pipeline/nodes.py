"""Nodes, which schedules list: forwards and backwards of one micro-batch in one stage; also as CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from typing import NamedTuple


class PipelineKind:
    """Kinds of the ops of a pipeline. Schedules list the first four, passes add the others."""

    FORWARD = "F"
    BACKWARD = "B"  # The whole backward: `BACKWARD_INPUT`, then `BACKWARD_WEIGHT`.
    BACKWARD_INPUT = "I"  # Gradients of the input, for which the previous stage waits.
    BACKWARD_WEIGHT = "W"  # Gradients of the weights, for which no other rank waits.
    ACTIVATION = "activation"  # Message to the next stage: the output of a forward.
    GRADIENT = "gradient"  # Message to the previous stage: the gradient of its output.
    LOSS = "loss"  # Message from the last stage: sum and number of the losses, by which gradients are divided.
    UNSHARD = "unshard"  # Gather the weights of a stage.
    REDUCE_GRAD = "reduce_grad"  # Sum the gradients of a stage over the data-parallel ranks, and free its weights.
    TIED = "tied"  # Sum the gradients of the copies of a parameter that several stages have.


COMPUTE_KINDS = (
    PipelineKind.FORWARD,
    PipelineKind.BACKWARD,
    PipelineKind.BACKWARD_INPUT,
    PipelineKind.BACKWARD_WEIGHT,
)
"""The kinds that a schedule lists."""
WEIGHT_KINDS = (PipelineKind.BACKWARD, PipelineKind.BACKWARD_WEIGHT)
"""The kinds that add to the gradients of a stage, and are the last to need the activations of a micro-batch."""


class Node(NamedTuple):
    """One micro-batch in one stage; as text ``2F0``: stage, kind, micro-batch."""

    stage: int
    kind: str  # One of `COMPUTE_KINDS`.
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def key(self) -> str:
        """Key of its op: stage and micro-batch."""
        return f"{self.stage}.{self.microbatch}"


Order = list[list[Node]]
"""The nodes of each rank of a pipeline, in the order in which it runs them."""


def F(stage: int, microbatch: int) -> Node:  # noqa: N802 - the letters of the papers
    """A forward."""
    return Node(stage, PipelineKind.FORWARD, microbatch)


def B(stage: int, microbatch: int) -> Node:  # noqa: N802
    """A whole backward."""
    return Node(stage, PipelineKind.BACKWARD, microbatch)


def I(stage: int, microbatch: int) -> Node:  # noqa: E743, N802
    """The part of a backward for which the previous stage waits."""
    return Node(stage, PipelineKind.BACKWARD_INPUT, microbatch)


def W(stage: int, microbatch: int) -> Node:  # noqa: N802
    """The part of a backward for which no rank waits."""
    return Node(stage, PipelineKind.BACKWARD_WEIGHT, microbatch)


def stage_ranks(order: Order) -> dict[int, int]:
    """Stage -> the rank that has it; a ``ValueError`` if two ranks have it."""
    rank_of: dict[int, int] = {}
    for rank, nodes in enumerate(order):
        for node in nodes:
            other = rank_of.setdefault(node.stage, rank)
            if other != rank:
                raise ValueError(f"stage {node.stage} is on ranks {other} and {rank} ({node}); it must be on one")
    return dict(sorted(rank_of.items()))


def peak_activations(nodes: Iterable[Node]) -> int:
    """Most activations that a rank holds, each from its forward to the end of its backward (``B`` or ``W``).

    The unit is one micro-batch of one stage.
    """
    alive = most = 0
    for node in nodes:
        if node.kind == PipelineKind.FORWARD:
            alive += 1
        elif node.kind != PipelineKind.BACKWARD_INPUT:
            alive -= 1
        most = max(most, alive)
    return most


_CELL = re.compile(r"(\d+)([FBIW])(\d+)")
# Torch's text for a forward and a backward that may run as one.
_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")


def order_to_csv(order: Order) -> str:
    """Make CSV, a row per rank, a cell per node, as torch's pipeline runtime reads and writes it (``compute_only``)."""
    text = io.StringIO()
    csv.writer(text).writerows(order)
    return text.getvalue()


def order_from_csv(text: str) -> Order:
    """Read the CSV of :func:`order_to_csv` or torch; empty cells are bubbles, overlapping pairs become a sequence."""
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
