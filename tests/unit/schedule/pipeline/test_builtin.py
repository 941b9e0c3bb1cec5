"""Bubble and memory of each schedule against the formulas of its docstring, and sizes that it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings

from lightning_muon.schedule.pipeline import (
    SCHEDULES,
    B,
    F,
    Order,
    Pipeline,
    StageCosts,
    add_reduce_grad,
    add_unshard,
    build_program,
    forward_only,
    make_order,
    peak_activations,
    register_schedule,
    stage_ranks,
    validate_pipeline,
)
from tests.unit.schedule.pipeline.problems import fitting, idle_seconds, problems, timeline

# Schedule: idle seconds for ranks p and (f, i, w), and memory for p and m; by any costs, or by f = i = w.
_ANY: dict[str, tuple[Callable[[int, float, float, float], float], Callable[[int, int], float]]] = {
    "gpipe": (lambda p, f, i, w: (p - 1) * (f + i + w), lambda p, m: m / p),
    "1f1b": (lambda p, f, i, w: (p - 1) * (f + i + w), lambda p, m: 1),
    "interleaved_1f1b": (lambda p, f, i, w: (p - 1) * (f + i + w), lambda p, m: 1 + (p - 1) / (2 * p)),
    "zb_h1": (lambda p, f, i, w: (p - 1) * (f + i - w), lambda p, m: 1),
    "zb_1p": (lambda p, f, i, w: (p - 1) * (f + i - w), lambda p, m: 1),
}
_EQUAL: dict[str, tuple[Callable[[int, float, float, float], float], Callable[[int, int], float]]] = {
    "zb_2p": (lambda p, f, i, w: 0, lambda p, m: (2 * p - 1) / p),
    "zb_v": (lambda p, f, i, w: 0, lambda p, m: 1),
    "v_half": (lambda p, f, i, w: f * (3 * (p - 1) - p % 2), lambda p, m: (p + 2 - p % 2) / (2 * p)),
    "v_min": (lambda p, f, i, w: f * (4 * p - 5 + 2 * (p % 3 == 0)), lambda p, m: math.ceil((p + 2) / 3) / p),
}


@pytest.mark.parametrize(
    ("name", "costs"),
    [*((name, costs) for name in _ANY for costs in ((1, 1, 1), (5, 4, 3))), *((name, (1, 1, 1)) for name in _EQUAL)],
)
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7, 9, 12])
def test_idle_time_and_memory_are_those_of_the_formula(
    name: str, costs: tuple[float, float, float], num_ranks: int
) -> None:
    forward, backward_input, backward_weight = costs
    stage_costs = StageCosts(forward=forward, backward_input=backward_input, backward_weight=backward_weight)
    idle, memory = (_ANY | _EQUAL)[name]
    for num_microbatches in (2 * num_ranks, 3 * num_ranks + (name in _EQUAL)):
        pipeline = fitting(name, num_ranks, num_microbatches, costs=stage_costs)
        order = make_order(name, pipeline)
        assert idle_seconds(timeline(order, pipeline)) == pytest.approx(idle(num_ranks, *costs), abs=1e-9)
        held = max(map(peak_activations, order)) / pipeline.num_stages
        assert held == pytest.approx(memory(num_ranks, num_microbatches))


@settings(deadline=None, max_examples=100)
@given(problems())
def test_every_schedule_of_any_size_and_costs_can_run(problem: tuple[str, Pipeline]) -> None:
    name, pipeline = problem
    order = make_order(name, pipeline)
    work = sum(pipeline.costs.of("F", stage) + pipeline.costs.of("B", stage) for stage in range(pipeline.num_stages))
    found = timeline(order, pipeline)
    assert sum(rank.compute_seconds for rank in found.ranks.values()) == pytest.approx(work * pipeline.num_microbatches)
    assert found.peak_bytes == max(map(peak_activations, order))
    validate_pipeline(add_reduce_grad(add_unshard(build_program(order, pipeline))), pipeline)


@settings(deadline=None, max_examples=50)
@given(problems())
def test_evaluation_runs_forward_only_under_any_placement(problem: tuple[str, Pipeline]) -> None:
    name, pipeline = problem
    rank_of = stage_ranks(make_order(name, pipeline))
    for num_microbatches in (1, pipeline.num_microbatches):
        evaluation = Pipeline(
            num_ranks=pipeline.num_ranks,
            num_microbatches=num_microbatches,
            stages_per_rank=pipeline.stages_per_rank,
            costs=pipeline.costs,
        )
        order = forward_only(evaluation, rank_of)
        assert stage_ranks(order) == rank_of
        program = build_program(order, evaluation)
        validate_pipeline(program, evaluation, is_training=False)
        assert timeline(order, evaluation).peak_bytes == 0


def test_a_schedule_of_a_user_takes_ten_lines() -> None:
    try:

        @register_schedule("one at a time")
        def one_at_a_time(pipeline: Pipeline) -> Order:
            each = range(pipeline.num_microbatches)
            return [[node for k in each for node in (F(rank, k), B(rank, k))] for rank in range(pipeline.num_ranks)]

        pipeline = Pipeline(num_ranks=3, num_microbatches=4)
        order = make_order("one at a time", pipeline)
        assert timeline(order, pipeline).makespan == 4 * 3 * 3
        with pytest.raises(ValueError, match="there is a schedule 'one at a time' already"):
            register_schedule("one at a time")(lambda pipeline: [])
    finally:
        SCHEDULES.pop("one at a time", None)
