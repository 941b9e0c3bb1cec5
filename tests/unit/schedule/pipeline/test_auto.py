"""The auto-scheduler is never worse than a schedule by name, keeps to the limit, and is quick."""

from __future__ import annotations

import math
import random
import time

import pytest

from lightning_muon.schedule.pipeline import Pipeline, StageCosts, check_order, make_order, peak_activations
from tests.unit.schedule.pipeline.problems import best_built_in, timeline


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


@pytest.mark.parametrize("first_seed", range(0, 300, 50))
def test_auto_is_never_worse_than_the_best_within_the_limit(first_seed: int) -> None:
    ratios: list[float] = []
    for seed in range(first_seed, first_seed + 50):
        pipeline = _random_pipeline(seed)
        order = make_order("auto", pipeline)
        assert max(map(peak_activations, order)) <= pipeline.memory_limit
        best = best_built_in(pipeline)
        assert best < math.inf, "some schedule fits"
        ratios.append(timeline(order, pipeline).makespan / best)
    assert max(ratios) <= 1 + 1e-9
    assert min(ratios) < 0.99, "some are better"


def test_auto_takes_any_sizes_that_others_refuse() -> None:
    for sizes in ((3, 1, 2), (4, 3, 5), (1, 1, 1), (2, 4, 3)):
        num_ranks, stages_per_rank, num_microbatches = sizes
        for limit in (stages_per_rank, stages_per_rank + 1, math.inf):
            pipeline = Pipeline(
                num_ranks=num_ranks,
                stages_per_rank=stages_per_rank,
                num_microbatches=num_microbatches,
                memory_limit=limit,
            )
            check_order(make_order("auto", pipeline), pipeline)


def test_every_rank_finds_the_same() -> None:
    pipeline = _random_pipeline(7)
    assert make_order("auto", pipeline) == make_order("auto", pipeline)


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
