"""Nodes, which schedules list: forwards and backwards of one micro-batch in one stage; also as CSV.

:class:`Pipeline` is what schedules are made for: sizes, measured costs, and a memory limit.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lightning_muon.config import check_one_of, check_whole
from lightning_muon.schedule.program import Op


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


# Kind of op -> the costs that it adds up.
_PARTS: dict[str, tuple[str, ...]] = {
    PipelineKind.FORWARD: ("forward",),
    PipelineKind.BACKWARD: ("backward_input", "backward_weight"),
    PipelineKind.BACKWARD_INPUT: ("backward_input",),
    PipelineKind.BACKWARD_WEIGHT: ("backward_weight",),
    PipelineKind.ACTIVATION: ("communication",),
    PipelineKind.GRADIENT: ("communication",),
    PipelineKind.LOSS: ("communication",),
    PipelineKind.TIED: ("communication",),
    PipelineKind.UNSHARD: (),
    PipelineKind.REDUCE_GRAD: ("reduce_grad",),
}


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Seconds of ops, of one micro-batch in any stage, of one message or (the last one) of a step.

    Example:
        >>> costs = StageCosts(forward=2.0, backward_input=1.5, backward_weight=0.5, communication=0.1)
        >>> costs.of("F"), costs.of("B")
        (2.0, 2.0)
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    communication: float = 0.0  # One message between two ranks, one at a time; also the norm over all stages.
    reduce_grad: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")

    def of(self, kind: str) -> float:
        """Seconds of an op of this kind."""
        check_one_of("kind", kind, tuple(_PARTS))
        return sum(getattr(self, name) for name in _PARTS[kind])

    def seconds(self, op: Op) -> float:
        """Seconds that the op takes once it has begun; :func:`~..simulate.simulate` calls it."""
        return self.of(op.kind)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The one argument of a schedule. Stages are numbered in the order of forward, over all ranks."""

    num_ranks: int
    num_microbatches: int
    stages_per_rank: int = 1
    costs: StageCosts = StageCosts()
    # Activations that a rank can hold, in units of one micro-batch of one stage.
    memory_limit: float = math.inf

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_microbatches", "stages_per_rank"):
            check_whole(name, getattr(self, name), at_least=1)
        if not self.memory_limit >= self.stages_per_rank:
            raise ValueError(
                f"memory_limit={self.memory_limit} holds less than one micro-batch in the {self.stages_per_rank} "
                f"stages of a rank; raise it to at least {self.stages_per_rank}"
            )

    @property
    def num_stages(self) -> int:
        """Number of stages over all ranks."""
        return self.num_ranks * self.stages_per_rank

    def loop_stages(self, rank: int) -> range:
        """Stages of a rank if they are dealt out in rounds: rank 1 of 4 has 1, 5, 9, ..."""
        return range(rank, self.num_stages, self.num_ranks)

    def v_stages(self, rank: int) -> tuple[int, int]:
        """The two stages of a rank if they run to the last rank and back: rank 1 of 4 has 1 and 6."""
        return rank, 2 * self.num_ranks - 1 - rank
