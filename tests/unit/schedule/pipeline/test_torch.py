"""Schedules and files of torch against ours."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from torch.distributed.pipelining import schedules

from lightning_muon.schedule.pipeline import (
    F,
    Order,
    Pipeline,
    make_order,
    order_from_csv,
    order_to_csv,
    peak_activations,
)
from tests.unit.schedule.pipeline.problems import fitting, problems, timeline


def _stages(pipeline: Pipeline, *, is_v: bool) -> list[Any]:
    """What torch's schedules read of the stages of rank 0."""
    return [
        SimpleNamespace(
            stage_index=index,
            num_stages=pipeline.num_stages,
            group_size=pipeline.num_ranks,
            group_rank=0,
            is_first=index == 0,
            is_last=index == pipeline.num_stages - 1,
            submod=None,
        )
        for index in (pipeline.v_stages(0) if is_v else pipeline.loop_stages(0))
    ]


def order_of_torch(kind: Callable[..., Any], pipeline: Pipeline) -> Order:
    stages = _stages(pipeline, is_v=kind in (schedules.ScheduleZBVZeroBubble, schedules.ScheduleDualPipeV))
    if issubclass(kind, schedules.PipelineScheduleSingle):  # type: ignore[arg-type]
        rows = kind(stages[0], pipeline.num_microbatches)._get_pipeline_order()
    else:
        rows = kind(stages, pipeline.num_microbatches).pipeline_order
    text = io.StringIO()
    csv.writer(text).writerows(
        ["" if each is None or each.computation_type == "REDUCE_GRAD" else str(each) for each in rows[rank]]
        for rank in sorted(rows)
    )
    return order_from_csv(text.getvalue())


_SAME = [
    ("gpipe", schedules.ScheduleGPipe),
    ("1f1b", schedules.Schedule1F1B),
    ("interleaved_1f1b", schedules.ScheduleInterleaved1F1B),
]


@pytest.mark.parametrize(("name", "kind"), _SAME)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_these_have_the_order_oforder_of_torch(name: str, kind: Callable[..., Any], num_ranks: int) -> None:
    for num_microbatches in (2 * num_ranks, 3 * num_ranks):
        pipeline = fitting(name, num_ranks, num_microbatches)
        ours, theirs = make_order(name, pipeline), order_of_torch(kind, pipeline)
        if name == "1f1b":
            # torch 2.13 counts the forwards of the last rank from 1 in this list, which its 1F1B does not run.
            theirs[-1] = [node._replace(microbatch=node.microbatch - (node.kind == "F")) for node in theirs[-1]]
        assert ours == theirs


@pytest.mark.parametrize(
    ("name", "kind", "stages_per_rank"),
    [
        ("zb_h1", schedules.ScheduleInterleavedZeroBubble, 1),
        ("zb_1p", schedules.ScheduleInterleavedZeroBubble, 1),
        ("zb_1p", schedules.ScheduleInterleavedZeroBubble, 2),
        ("zb_1p", schedules.ScheduleInterleavedZeroBubble, 3),
        ("zb_v", schedules.ScheduleZBVZeroBubble, 2),
    ],
)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_these_are_as_fast_as_torch_in_no_more_memory(
    name: str, kind: Callable[..., Any], stages_per_rank: int, num_ranks: int
) -> None:
    for num_microbatches in (2 * num_ranks, 4 * num_ranks):
        pipeline = fitting(name, num_ranks, num_microbatches, stages_per_rank=stages_per_rank)
        ours, theirs = make_order(name, pipeline), order_of_torch(kind, pipeline)
        assert timeline(ours, pipeline).makespan <= timeline(theirs, pipeline).makespan
        assert max(map(peak_activations, ours)) <= max(map(peak_activations, theirs))
        if name == "zb_h1":
            assert ours == theirs


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zb_1p", "zb_v", "v_half", "v_min"])
def test_torch_runs_our_files(name: str, tmp_path: Path) -> None:
    pipeline = fitting(name, 3, 6)
    path = tmp_path / "schedule.csv"
    path.write_text(order_to_csv(make_order(name, pipeline)), newline="")
    is_v = name in ("zb_v", "v_half", "v_min")
    runtime = schedules._PipelineScheduleRuntime(_stages(pipeline, is_v=is_v), 6)
    runtime._load_csv(str(path), "compute_only")  # Adds messages; raises where a rank would wait for ever.


@settings(deadline=None, max_examples=50)
@given(problems())
def test_orders_survive_a_file(problem: tuple[str, Pipeline]) -> None:
    order = make_order(*problem)
    assert order_from_csv(order_to_csv(order)) == order


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
