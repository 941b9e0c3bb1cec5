"""The input of a schedule: sizes of the pipeline, measured costs, and a memory limit."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_muon.config import check_whole
from lightning_muon.schedule.pipeline.nodes import PipelineKind
from lightning_muon.schedule.program import Op

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
