"""Schedules and files of torch against ours."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from lightning_muon.schedule.pipeline import (
    Order,
    Pipeline,
    add_reduce_grad,
    add_unshard,
    build_program,
    check_order,
    make_order,
    order_from_csv,
    order_to_csv,
    peak_activations,
    validate_pipeline,
)
from tests.support.pipeline_csv import program_from_csv, program_to_csv
from tests.unit.schedule.pipeline.problems import fitting, timeline


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


def order_of_torch(kind: Callable[..., Any], pipeline: Pipeline) -> tuple[Order, Any]:
    """The order of torch's schedule, and the schedule."""
    stages = _stages(pipeline, is_v=kind in (schedules.ScheduleZBVZeroBubble, schedules.ScheduleDualPipeV))
    if issubclass(kind, schedules.PipelineScheduleSingle):  # type: ignore[arg-type]
        schedule = kind(stages[0], pipeline.num_microbatches)
        rows = schedule._get_pipeline_order()
    else:
        schedule = kind(stages, pipeline.num_microbatches)
        rows = schedule.pipeline_order
    text = io.StringIO()
    csv.writer(text).writerows(
        ["" if each is None or each.computation_type == "REDUCE_GRAD" else str(each) for each in rows[rank]]
        for rank in sorted(rows)
    )
    return order_from_csv(text.getvalue()), schedule


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
        ours, theirs = make_order(name, pipeline), order_of_torch(kind, pipeline)[0]
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
        ours, theirs = make_order(name, pipeline), order_of_torch(kind, pipeline)[0]
        assert timeline(ours, pipeline).makespan <= timeline(theirs, pipeline).makespan
        assert max(map(peak_activations, ours)) <= max(map(peak_activations, theirs))
        if name == "zb_h1":
            assert ours == theirs


_LOOPS = ["interleaved_1f1b", "zb_1p"]


@pytest.mark.parametrize("name", [*_LOOPS, "zb_v", "v_half", "v_min"])
def test_torch_runs_our_files(name: str, tmp_path: Path) -> None:
    pipeline = fitting(name, 3, 6)
    order = make_order(name, pipeline)
    plain = build_program(order, pipeline)

    def load(text: str, kind: str) -> Any:
        path = tmp_path / "schedule.csv"
        path.write_text(text, newline="")
        runtime = schedules._PipelineScheduleRuntime(_stages(pipeline, is_v=name not in _LOOPS), 6)
        runtime._load_csv(str(path), kind)
        runtime._dump_csv(str(path), "compute_comms")
        validate_pipeline(program_from_csv(path.read_text()), pipeline)
        return runtime

    load(order_to_csv(order), "compute_only")
    load(program_to_csv(add_reduce_grad(add_unshard(plain))), "compute_comms")
    # Raises where a rank waits for ever; knows nothing but computation and messages.
    load(program_to_csv(plain), "compute_comms")._simulate()


@pytest.mark.parametrize("kind", [schedules.ScheduleZBVZeroBubble, schedules.ScheduleInterleaved1F1B])
def test_receives_that_torch_defers_are_refused_or_in_order(kind: Callable[..., Any]) -> None:
    pipeline = fitting("zb_v", 4, 8)
    order, schedule = order_of_torch(kind, pipeline)
    check_order(order, pipeline)
    rows = schedules._defer_recv_ops(schedule.pipeline_order_with_comms, schedule.stage_index_to_group_rank.__getitem__)
    text = io.StringIO()
    csv.writer(text).writerows([str(each) for each in rows[rank]] for rank in sorted(rows))
    # torch places a receive right in front of what needs it, which is another order than that of the sends.
    with pytest.raises(ValueError, match="deadlock"):
        validate_pipeline(program_from_csv(text.getvalue()), pipeline)
