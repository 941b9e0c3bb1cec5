"""Orders and programs that cannot run are refused, and the node is named; all that can run make a valid program."""

from __future__ import annotations

import random
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_muon.schedule.pipeline import (
    SCHEDULES,
    B,
    F,
    I,
    Node,
    Order,
    Pipeline,
    W,
    add_reduce_grad,
    add_unshard,
    build_program,
    check_order,
    make_order,
    order_from_csv,
    peak_activations,
    register_schedule,
)
from lightning_muon.schedule.pipeline.play import Run, play_order
from lightning_muon.schedule.program import validate
from lightning_muon.schedule.simulate import simulate
from tests.unit.schedule.pipeline.problems import fitting, problems


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n", "1 ranks are listed, the pipeline has num_ranks=2"),
        ("0F0,0B0\n0F0,1F0,1B0\n", r"stage 0 is on ranks 0 and 1 \(0F0\)"),
        ("0F0,0B0,2F0\n1F0,1B0\n", "2F0 on rank 0 is not in a pipeline of 2 stages and 1 micro-batches"),
        ("0F0,0B0,0F1\n1F0,1B0\n", "0F1 on rank 0 is not in a pipeline"),
        ("0F0,0F0,0B0\n1F0,1B0\n", "0F0 is on rank 0 twice"),
        ("0F0,0B0\n1B0\n", "1F0 is missing"),
        ("0F0,0B0\n1F0\n", r"micro-batch 0 needs either 1B0 or both 1I0 and 1W0; there are \[\]"),
        ("0F0,0B0\n1F0,1I0\n", r"there are \['1I0'\]"),
        ("0F0,0B0\n1F0,1B0,1I0,1W0\n", r"there are \['1B0', '1I0', '1W0'\]"),
        ("0F0,0B0\n1F0,1W0,1I0\n", "stage 1 runs the backward of micro-batch 0 too early"),
        ("0B0,0F0\n1F0,1B0\n", "stage 0 runs the backward of micro-batch 0 too early"),
        # In a file of torch: bubbles, and pairs that may run as one.
        (",0F0, 0B0,,(1F0;1B0)OVERLAP_F_B,\n1F0\n", r"stage 1 is on ranks 0 and 1 \(1F0\)"),
        ("0F0,0X0\n", "row 0 has '0X0'; a cell is a stage, one of F, B, I and W, and a micro-batch"),
        ("0F\n", "row 0 has '0F'"),
        ("0F0,0SEND_F0\n1F0\n", "row 0 has '0SEND_F0'; a cell is a stage, one of F, B, I and W"),
    ],
)
def test_an_incomplete_or_wrong_order_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_order(order_from_csv(text), Pipeline(num_ranks=2, num_microbatches=1))


def test_a_broken_schedule_is_named() -> None:
    pipeline = Pipeline(num_ranks=2, num_microbatches=2)
    waiting = order_from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    with mock.patch.dict(SCHEDULES):
        register_schedule("broken")(lambda pipeline: waiting)
        with pytest.raises(ValueError, match="'broken': deadlock: 0B0 of rank 0, 1F1 of rank 1 wait for what can nev"):
            make_order("broken", pipeline)
        with pytest.raises(ValueError, match="there is a schedule 'broken' already"):
            register_schedule("broken")(lambda pipeline: [])


def _any_order(pipeline: Pipeline, rank_of: dict[int, int], seed: int) -> Order:
    """Each rank runs any node that is ready, of whole and split backwards."""
    draw = random.Random(seed)
    stages = range(pipeline.num_stages)
    todo = {F(stage, each) for stage in stages for each in range(pipeline.num_microbatches)}
    for forward in sorted(todo):
        whole = {B(forward.stage, forward.microbatch)}
        split = {I(forward.stage, forward.microbatch), W(forward.stage, forward.microbatch)}
        todo |= draw.choice([whole, split])

    def choose(run: Run, rank: int) -> Node | None:
        ready = sorted(node for node in todo if rank_of[node.stage] == rank and run.is_ready(node))
        if not ready:
            return None
        todo.remove(node := draw.choice(ready))
        return node

    return Run(pipeline, rank_of).play(choose).order


@settings(deadline=None, max_examples=50)
@given(problems(), st.integers(0, 10**6))
def test_any_order_that_can_run_makes_a_valid_program(problem: tuple[str, Pipeline], seed: int) -> None:
    _, pipeline = problem
    pipeline = replace(pipeline, num_microbatches=min(4, pipeline.num_microbatches))
    rank_of = {stage: seed * 7919 // (stage + 1) % pipeline.num_ranks for stage in range(pipeline.num_stages)}
    order = _any_order(pipeline, rank_of, seed)
    program = build_program(order, pipeline)
    timeline = simulate(program, pipeline.costs)
    assert timeline.makespan == play_order(order, pipeline, rank_of).makespan
    assert timeline.peak_bytes == max(map(peak_activations, order))
    validate(add_reduce_grad(add_unshard(program)))


def test_too_many_activations_are_refused() -> None:
    pipeline = fitting("zb_v", 2, 4)
    with pytest.raises(ValueError, match="rank 0 holds 4 activations, memory_limit=3"):
        check_order(make_order("zb_v", pipeline), replace(pipeline, memory_limit=3))
