"""The options of a pipeline, beside the number of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_muon.config import check_whole
from lightning_muon.schedule.pipeline import Pipeline, find_schedule, make_order

# Schedules that visit each rank several times, in rounds or there and back, so that it has several stages.
_STAGES_PER_RANK = {"interleaved_1f1b": 2, "zb_v": 2, "v_half": 2, "v_min": 2}
# The bubble of 1F1B is then at most a fifth of a step: (p - 1) / (m + p - 1).
_MICROBATCHES_PER_RANK = 4


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """How a pipeline runs; ``pipeline_size`` says on how many ranks.

    Args:
        pipeline_schedule: In which order each rank runs micro-batches: one of
            :data:`~lightning_muon.schedule.pipeline.SCHEDULES`, among them those of ``@register_schedule``.
        pipeline_microbatches: Micro-batches of each batch. ``"auto"``: four for each rank of the pipeline. Rows that do
            not divide make some larger by one; a batch of fewer rows has one of each row. Losses are summed, so both
            are exact.
        pipeline_split: Names of the first part of each stage. ``None``: about as many elements of matrices in
            each.
        pipeline_stages_per_rank: ``"auto"``: what the schedule needs, 2 for those that visit a rank twice, else 1.
    """

    pipeline_schedule: str = "1f1b"
    pipeline_microbatches: int | Literal["auto"] = "auto"
    pipeline_split: Sequence[str] | None = None
    pipeline_stages_per_rank: int | Literal["auto"] = "auto"

    def check_pipeline(self, num_ranks: int) -> None:
        """Raise ``ValueError`` for values that do not exist, or that a pipeline of ``num_ranks`` cannot have."""
        find_schedule(self.pipeline_schedule)
        for name in ("pipeline_microbatches", "pipeline_stages_per_rank"):
            if (value := getattr(self, name)) != "auto":
                check_whole(name, value, at_least=1, other="'auto' or ")
        if num_ranks == 1:
            changed = [f"{name}={value!r}" for name, value in self.own().items() if value != getattr(type(self), name)]
            if changed:
                raise ValueError(f"{', '.join(changed)} means nothing without pipeline_size; set it to 2 or more")
            return
        make_order(self.pipeline_schedule, self.sizes(num_ranks, self.num_microbatches(num_ranks)))

    def own(self) -> dict[str, object]:
        """All pipeline options by name."""
        return {name: getattr(self, name) for name in PipelineOptions.__dataclass_fields__}

    def num_microbatches(self, num_ranks: int) -> int:
        """Number of micro-batches of each batch."""
        auto = _MICROBATCHES_PER_RANK * num_ranks
        return auto if self.pipeline_microbatches == "auto" else self.pipeline_microbatches

    def sizes(self, num_ranks: int, num_microbatches: int) -> Pipeline:
        """The sizes for which the schedule is made."""
        return Pipeline(num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=self.stages_per_rank)

    @property
    def stages_per_rank(self) -> int:
        """``pipeline_stages_per_rank`` as a number."""
        given = self.pipeline_stages_per_rank
        return _STAGES_PER_RANK.get(self.pipeline_schedule, 1) if given == "auto" else given
