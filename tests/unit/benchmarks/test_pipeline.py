"""What the benchmark of pipelines predicts of steps in a row: the formulas of docs/pipelines.md."""

from __future__ import annotations

from random import Random

import pytest

from benchmarks.pipeline import Measured, in_a_row
from lightning_muon.schedule.pipeline import Pipeline, PipelineKind, add_reduce_grad, build_program, make_order
from lightning_muon.schedule.simulate import simulate


@pytest.mark.parametrize("seed", range(20))
def test_seconds_per_step_of_1f1b_in_a_row(seed: int) -> None:
    random = Random(seed)
    p, m, f, b = random.randint(2, 5), random.randint(5, 9), random.uniform(1, 3), random.uniform(1, 5)
    optimizer = [random.choice([0, 1, 10, 30]) * random.random() for _ in range(p)]
    kinds = {PipelineKind.FORWARD: [f] * p, PipelineKind.BACKWARD: [b] * p, PipelineKind.OPTIMIZER: optimizer}
    seconds_of = {(kind, stage): value for kind, values in kinds.items() for stage, value in enumerate(values)}
    pipeline = Pipeline(num_ranks=p, num_microbatches=m)
    program = add_reduce_grad(build_program(make_order("1f1b", pipeline), pipeline, tells_loss=True))

    def per_step(*, is_together: bool) -> float:
        costs = Measured(seconds_of, message=0.0, agreement=0.0)
        rows = (in_a_row(program, number, is_together=is_together) for number in (2, 6))
        few, many = (simulate(each, costs).makespan for each in rows)
        return (many - few) / 4

    batch, last = (m + p - 1) * (f + b), range(1, p)
    at_once = batch + max(optimizer[0], *(optimizer[r] - f - r * b for r in last))
    barrier = batch + max(optimizer[0], *(optimizer[r] - f for r in last))
    assert per_step(is_together=False) == pytest.approx(at_once)
    assert per_step(is_together=True) == pytest.approx(barrier)
