"""Programs: messages, gathers, and gradients summed over data-parallel ranks."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_muon.schedule.pipeline import (
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
    make_order,
    peak_activations,
    validate_pipeline,
)
from lightning_muon.schedule.pipeline.play import Run, play_order
from lightning_muon.schedule.program import Program
from lightning_muon.schedule.simulate import simulate
from tests.unit.schedule.pipeline.problems import fitting, problems


def _full(pipeline: Pipeline, name: str) -> Program:
    return add_reduce_grad(add_unshard(build_program(make_order(name, pipeline), pipeline)))


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
    validate_pipeline(add_reduce_grad(add_unshard(program)), pipeline)


def _without(program: Program, rank: int, name: str) -> Program:
    return {**program, rank: [op for op in program[rank] if op.name != name]}


def _exchanged(program: Program, rank: int, first: str, second: str) -> Program:
    ops = {op.name: op for op in program[rank]}
    names = {first: second, second: first}
    return {**program, rank: [ops[names.get(op.name, op.name)] for op in program[rank]]}


@pytest.mark.parametrize(
    ("rank", "change", "message"),
    [
        # The order of messages between two ranks.
        (1, ("activation[0.0]", "activation[0.1]"), r"deadlock.*activation\[0.0\] of rank 0 waits for rank 1"),
        (0, ("activation[0.1]", "gradient[1.0]"), r"deadlock.* waits for"),
        (1, ("reduce_grad[1]", "B[1.0]"), r"reduce_grad\[1\] of rank 1 comes before stage 1 has all gradients"),
        (0, ("F[0.0]", "B[0.0]"), "stage 0 runs the backward of micro-batch 0 too early"),
        (0, ("gradient[1.1]",), r"B\[0.1\] of rank 0 depends on gradient\[1.1\]|waits for rank 0"),
        (0, ("B[0.1]",), r"micro-batch 1 needs either 0B1 or both 0I1 and 0W1; there are \[\]"),
        (1, ("F[1.1]",), "1F1 is missing"),
    ],
)
def test_a_broken_program_is_refused(rank: int, change: tuple[str, ...], message: str) -> None:
    pipeline = Pipeline(num_ranks=2, num_microbatches=2)
    program = _full(pipeline, "1f1b")
    validate_pipeline(program, pipeline)
    broken = _without(program, rank, *change) if len(change) == 1 else _exchanged(program, rank, *change)
    with pytest.raises(ValueError, match=message):
        validate_pipeline(broken, pipeline)


def test_too_many_activations_or_a_missing_sum_are_refused() -> None:
    pipeline = fitting("zb_v", 2, 4)
    program = _full(pipeline, "zb_v")
    with pytest.raises(ValueError, match="rank 0 holds 4 activations, memory_limit=3"):
        validate_pipeline(program, replace(pipeline, memory_limit=3))
    with pytest.raises(
        ValueError, match=r"rank 1 has reduce_grad of the stages \[2\]; it must have one of each of \[1, 2\]"
    ):
        validate_pipeline(_without(program, 1, "reduce_grad[1]"), pipeline)
