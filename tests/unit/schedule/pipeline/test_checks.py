"""Orders that are not schedules are refused, and the node is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_muon.schedule.pipeline import (
    SCHEDULES,
    F,
    Pipeline,
    check_order,
    make_order,
    order_from_csv,
    register_schedule,
)


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
    ],
)
def test_an_incomplete_or_wrong_order_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_order(order_from_csv(text), Pipeline(num_ranks=2, num_microbatches=1))


def test_ranks_that_wait_for_each_other_are_refused() -> None:
    order = order_from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    with pytest.raises(ValueError, match="deadlock: 0B0 of rank 0, 1F1 of rank 1 wait for what can never begin"):
        check_order(order, Pipeline(num_ranks=2, num_microbatches=2))


def test_whole_and_split_backwards_may_be_mixed() -> None:
    order = order_from_csv("0F0,0F1,0B0,0I1,0W1\n1F0,1I0,1F1,1B1,1W0\n")
    check_order(order, Pipeline(num_ranks=2, num_microbatches=2))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda pipeline: [[] for _ in range(2)], "0F0 is missing"),
        (lambda pipeline: [[F(rank, each) for each in range(2)] for rank in range(2)], "needs either 0B0 or both"),
    ],
)
def test_a_broken_schedule_is_named(schedule: Callable[[Pipeline], Any], message: str) -> None:
    pipeline = Pipeline(num_ranks=2, num_microbatches=2)
    try:
        register_schedule("broken")(schedule)
        with pytest.raises(ValueError, match=f"schedule 'broken'.*{message}"):
            make_order("broken", pipeline)
    finally:
        SCHEDULES.pop("broken", None)
