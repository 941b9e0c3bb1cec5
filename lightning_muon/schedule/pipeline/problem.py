"""The input of a schedule: sizes of the pipeline, measured costs, and a memory limit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

from lightning_muon.config import check_whole
from lightning_muon.schedule.pipeline.nodes import PipelineKind
from lightning_muon.schedule.program import Op

PerStage = float | tuple[float, ...]
"""One number for all stages, or one for each."""

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
    PipelineKind.UNSHARD: ("unshard",),
    PipelineKind.REDUCE_GRAD: ("reduce_grad",),
}


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Seconds of ops, of one micro-batch or (the last two) of a step; all but ``communication`` may differ by stage.

    Example:
        >>> costs = StageCosts(forward=(1.0, 2.0), backward_input=1.5, backward_weight=0.5, communication=0.1)
        >>> costs.of("F", stage=1), costs.of("B", stage=0)
        (2.0, 2.0)
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    communication: float = 0.0  # One message between two ranks, one at a time; also the norm over all stages.
    unshard: PerStage = 0.0
    reduce_grad: PerStage = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int | float if name == "communication" else int | float | tuple):
                raise ValueError(f"{name} must be a number, or a tuple of one for each stage, got {value!r}")
        for name, values in self.by_stage().items():
            if not values or not all(0 <= each < math.inf for each in values):
                raise ValueError(f"{name} must be finite and at least 0, got {getattr(self, name)!r}")

    def by_stage(self) -> dict[str, tuple[float, ...]]:
        """All costs as tuples; a tuple of one if all stages have the same cost."""
        values = cast("dict[str, PerStage]", vars(self))
        return {name: value if isinstance(value, tuple) else (value,) for name, value in values.items()}

    def of(self, kind: str, stage: int) -> float:
        """Seconds of an op of this kind in this stage."""
        if kind not in _PARTS:
            raise ValueError(f"{kind!r} is no op of a pipeline; there are {', '.join(_PARTS)}")
        total = 0.0
        for name in _PARTS[kind]:  # Planners ask for millions of ops: a loop takes half the time of a sum.
            value: PerStage = getattr(self, name)
            total += value[stage % len(value)] if isinstance(value, tuple) else value
        return total

    def seconds(self, op: Op) -> float:
        """Seconds that the op takes once it has begun; :func:`~..simulate.simulate` calls it."""
        return self.of(op.kind, op.items[0] if op.items else 0)


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
        for name, values in self.costs.by_stage().items():
            if len(values) not in (1, self.num_stages):
                raise ValueError(
                    f"costs.{name} must be one number or {self.num_stages}, one for each of the num_ranks * "
                    f"stages_per_rank stages, got {values}"
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
