"""What users choose of a pipeline: defaults, and values that are refused."""

from __future__ import annotations

import pytest

from lightning_muon.pipeline.options import PipelineOptions
from lightning_muon.schedule.pipeline import SCHEDULES
from tests.unit.schedule.pipeline.problems import BUILT_IN, STAGES_PER_RANK


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_defaults_go_with_every_schedule(name: str, num_ranks: int) -> None:
    options = PipelineOptions(pipeline_schedule=name)
    options.check_pipeline(num_ranks)
    assert options.num_microbatches(num_ranks) == 4 * num_ranks
    assert options.stages_per_rank == {"interleaved_1f1b": 2, "zb_1p": 1}.get(name, STAGES_PER_RANK.get(name))
    assert set(BUILT_IN) <= set(SCHEDULES)


def test_numbers_take_the_place_of_auto() -> None:
    options = PipelineOptions(pipeline_schedule="zb_1p", pipeline_microbatches=6, pipeline_stages_per_rank=3)
    options.check_pipeline(2)
    assert (options.num_microbatches(2), options.stages_per_rank) == (6, 3)
