"""The schedules of examples/schedules.py, which are registered as a user's are."""

from __future__ import annotations

from collections.abc import Generator
from unittest.mock import patch

import pytest
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from lightning_muon.schedule.pipeline import (
    SCHEDULES,
    Pipeline,
    StageCosts,
    add_reduce_grad,
    add_unshard,
    build_program,
    make_order,
    peak_activations,
    stage_ranks,
    validate_pipeline,
)
from lightning_muon.schedule.pipeline.play import play_order
from lightning_muon.schedule.simulate import simulate
from tests.distributed.pipeline.models import load_example
from tests.distributed.pipeline.test_runtime import Case, alone, in_pipeline, require_equal
from tests.support.processes import ProcessPool
from tests.unit.schedule.pipeline.problems import idle_seconds, timeline
from tests.unit.schedule.pipeline.test_torch import order_of_torch


@pytest.fixture(autouse=True)
def _registered() -> Generator[None]:
    with patch.dict(SCHEDULES):
        load_example("schedules")
        yield


def _v(num_ranks: int, num_microbatches: int, *costs: float) -> Pipeline:
    seconds = StageCosts(**dict(zip(("forward", "backward_input", "backward_weight"), costs, strict=False)))
    return Pipeline(num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=2, costs=seconds)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (5, 4, 3)])
def test_bubble_and_memory_of_dual_pipe_v_are_those_of_the_formula(num_ranks: int, f: int, i: int, w: int) -> None:
    for num_microbatches in (2 * num_ranks, 3 * num_ranks):
        pipeline = _v(num_ranks, num_microbatches, f, i, w)
        order = make_order("dual_pipe_v", pipeline)
        assert idle_seconds(timeline(order, pipeline)) == pytest.approx((num_ranks - 1) * (f + i - w))
        assert max(map(peak_activations, order)) == 2 * num_ranks + 1
        assert order == order_of_torch(ScheduleDualPipeV, pipeline)


@pytest.mark.parametrize("name", ["auto", "dual_pipe_v"])
@pytest.mark.parametrize("costs", [(1.0, 1.0, 1.0), (2.0, 3.0, 1.0), (1.0, 1.0, 0.0), (0.0, 0.0, 1.0)])
def test_their_programs_are_valid_and_take_the_time_of_the_order(name: str, costs: tuple[float, ...]) -> None:
    for num_ranks in (1, 2, 3):
        pipeline = _v(num_ranks, 2 * num_ranks + 1, *costs)
        order = make_order(name, pipeline)
        assert make_order(name, pipeline) == order, "every rank finds the same"
        program = build_program(order, pipeline)
        assert simulate(program, pipeline.costs).makespan == play_order(order, pipeline, stage_ranks(order)).makespan
        validate_pipeline(add_reduce_grad(add_unshard(program)), pipeline)


# The last batch has fewer rows than either takes micro-batches.
_BATCHES = ((13, 5), (13, 5), (2, 5))
CASES = [
    Case(batches=_BATCHES, options={"pipeline_schedule": name, "pipeline_stages_per_rank": stages})
    for name, stages in (("auto", 1), ("auto", 2), ("dual_pipe_v", 2))
]


def _train() -> list[object]:
    with patch.dict(SCHEDULES):
        load_example("schedules")
        return [in_pipeline(case) for case in CASES]


def test_their_gradients_are_those_of_one_process(gloo: ProcessPool) -> None:
    expected = alone(CASES[0], 1)
    for case, *of_ranks in zip(CASES, *gloo.run(_train, world_size=2), strict=True):
        require_equal(case, expected, of_ranks)
