"""CSV there and back, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from lightning_muon.schedule.pipeline import (
    F,
    Pipeline,
    add_optimizer,
    add_reduce_grad,
    add_unshard,
    build_program,
    make_order,
    order_from_csv,
    order_to_csv,
    validate_pipeline,
)
from lightning_muon.schedule.simulate import simulate
from tests.support.pipeline_csv import program_from_csv, program_to_csv
from tests.unit.schedule.pipeline.problems import problems


@settings(deadline=None, max_examples=50)
@given(problems())
def test_orders_and_programs_survive_a_file(problem: tuple[str, Pipeline]) -> None:
    name, pipeline = problem
    order = make_order(name, pipeline)
    assert order_from_csv(order_to_csv(order)) == order
    program = add_reduce_grad(add_unshard(build_program(order, pipeline)))
    text = program_to_csv(program)
    read = program_from_csv(text)
    validate_pipeline(read, pipeline)
    assert program_to_csv(read) == text
    assert [[op.name for op in ops] for ops in read.values()] == [[op.name for op in ops] for ops in program.values()]
    assert simulate(read, pipeline.costs).makespan == simulate(program, pipeline.costs).makespan


def test_messages_are_written_as_torch_does() -> None:
    pipeline = Pipeline(num_ranks=2, num_microbatches=1)
    program = add_reduce_grad(add_unshard(build_program(make_order("gpipe", pipeline), pipeline)))
    assert program_to_csv(add_optimizer(program)).splitlines() == [
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD",
        "1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1RESHARD",
    ]


def test_bubbles_and_pairs_are_read() -> None:
    order = order_from_csv(",0F0, 0F1 ,,(1F0;1B0)OVERLAP_F_B,\n")
    assert order[0][:3] == [F(0, 0), F(0, 1), F(1, 0)]
    assert str(order[0][3]) == "1B0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0\n", "row 0 has '0X0'; a cell is a stage, one of F, B, I and W, and a micro-batch"),
        ("0F\n", "row 0 has '0F'"),
        ("0F0,0SEND_F0\n1F0\n", "row 0 has '0SEND_F0'; a cell is a stage, one of F, B, I and W"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        order_from_csv(text)
