"""The schedules of examples/schedules.py, which are registered as a user's are."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Generator
from unittest.mock import patch

import pytest
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from lightning_muon.schedule.pipeline import (
    SCHEDULES,
    Pipeline,
    StageCosts,
    add_optimizer,
    add_reduce_grad,
    add_unshard,
    build_program,
    check_order,
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
from tests.unit.schedule.pipeline.problems import BUILT_IN, idle_seconds, timeline
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


@pytest.mark.parametrize("sizes", [(4, 8, 1), (4, 7, 2)])
def test_sizes_that_dual_pipe_v_cannot_take_are_refused(sizes: tuple[int, int, int]) -> None:
    pipeline = Pipeline(num_ranks=sizes[0], num_microbatches=sizes[1], stages_per_rank=sizes[2])
    with pytest.raises(ValueError, match="exactly 2 stages per rank and at least 8 micro-batches on 4 ranks, got"):
        make_order("dual_pipe_v", pipeline)


def _random_pipeline(seed: int) -> Pipeline:
    draw = random.Random(seed)
    num_ranks, stages_per_rank = draw.choice([(2, 1), (3, 1), (2, 2)])
    num_stages = num_ranks * stages_per_rank

    def seconds(least: float, most: float) -> tuple[float, ...]:
        return tuple(draw.uniform(least, most) for _ in range(num_stages))

    return Pipeline(
        num_ranks=num_ranks,
        stages_per_rank=stages_per_rank,
        num_microbatches=draw.randint(num_ranks, 2 * num_ranks + 1),
        costs=StageCosts(
            forward=seconds(0.5, 2),
            backward_input=seconds(0.5, 2),
            backward_weight=seconds(0.1, 2),
            communication=draw.choice([0.0, draw.uniform(0, 0.5)]),
        ),
        memory_limit=draw.choice([num_stages, num_stages + 1, 2 * num_stages, math.inf]),
    )


def _best_by_name(pipeline: Pipeline) -> float:
    """Seconds of the fastest schedule that takes the pipeline and keeps to its limit."""
    found: list[float] = []
    for name in (*BUILT_IN, "dual_pipe_v"):
        try:
            found.append(timeline(make_order(name, pipeline), pipeline).makespan)
        except ValueError:
            continue
    return min(found)


@pytest.mark.parametrize("first_seed", range(0, 300, 50))
def test_auto_is_never_worse_than_the_best_within_the_limit(first_seed: int) -> None:
    ratios: list[float] = []
    for seed in range(first_seed, first_seed + 50):
        pipeline = _random_pipeline(seed)
        order = make_order("auto", pipeline)
        assert max(map(peak_activations, order)) <= pipeline.memory_limit
        ratios.append(timeline(order, pipeline).makespan / _best_by_name(pipeline))
    assert max(ratios) <= 1 + 1e-9
    assert min(ratios) < 0.99, "some are better"
    assert make_order("auto", pipeline) == order, "every rank finds the same"


@pytest.mark.parametrize("sizes", [(3, 1, 2), (4, 3, 5), (1, 1, 1), (2, 4, 3)])
def test_auto_takes_any_sizes_that_others_refuse(sizes: tuple[int, int, int]) -> None:
    num_ranks, stages, num_microbatches = sizes
    for limit in (stages, stages + 1, math.inf):
        pipeline = Pipeline(
            num_ranks=num_ranks, stages_per_rank=stages, num_microbatches=num_microbatches, memory_limit=limit
        )
        check_order(make_order("auto", pipeline), pipeline)


@pytest.mark.parametrize(("num_ranks", "stages_per_rank"), [(16, 1), (8, 2)])
def test_16_stages_and_64_microbatches_take_seconds(num_ranks: int, stages_per_rank: int) -> None:
    costs = StageCosts(
        forward=tuple(1 + 0.03 * stage for stage in range(16)),
        backward_input=1.1,
        backward_weight=0.8,
        communication=0.1,
    )
    pipeline = Pipeline(
        num_ranks=num_ranks, stages_per_rank=stages_per_rank, num_microbatches=64, costs=costs, memory_limit=16
    )
    started = time.process_time()
    make_order("auto", pipeline)
    # 2 to 4 seconds of one core.
    assert time.process_time() - started < 10


@pytest.mark.parametrize("name", ["auto", "dual_pipe_v"])
@pytest.mark.parametrize("costs", [(1.0, 1.0, 1.0), (2.0, 3.0, 1.0), (1.0, 1.0, 0.0), (0.0, 0.0, 1.0)])
def test_their_programs_are_valid_and_take_the_time_of_the_order(name: str, costs: tuple[float, ...]) -> None:
    for num_ranks in (1, 2, 3):
        pipeline = _v(num_ranks, 2 * num_ranks + 1, *costs)
        order = make_order(name, pipeline)
        program = build_program(order, pipeline)
        assert simulate(program, pipeline.costs).makespan == play_order(order, pipeline, stage_ranks(order)).makespan
        validate_pipeline(add_optimizer(add_reduce_grad(add_unshard(program))), pipeline)


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
