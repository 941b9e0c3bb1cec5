"""Recorded steps: complete, in the order that the plan promises, and without influence on the weights."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_muon import ParallelMuon
from lightning_muon.monitor import timeline
from lightning_muon.monitor.calibrate import make_optimizer
from lightning_muon.monitor.timeline import Recording, TimelineRecorder, record_step
from lightning_muon.schedule.program import TRANSFER, Op, OpKind
from lightning_muon.schedule.shapes import ModelShapes, ParameterShape
from lightning_muon.schedule.validate import validate
from tests.support.processes import ProcessPool

MODEL = ModelShapes(
    name="odd",
    source="",
    parameters=(
        ParameterShape(name="a", shape=(13, 7), kind="matrix"),
        ParameterShape(name="b", shape=(7, 20), kind="matrix"),
        ParameterShape(name="c", shape=(3, 5), kind="matrix"),
        ParameterShape(name="bias", shape=(9,), kind="elementwise"),
    ),
)


def _record(num_replicas: int, overlap: str, dedupe: str) -> Recording:
    optimizer = make_optimizer(MODEL, num_replicas=num_replicas, overlap=overlap, dedupe=dedupe, chunk_bytes=50)
    optimizer.step()
    return record_step(optimizer)


@pytest.mark.parametrize(
    ("world_size", "num_replicas", "overlap", "dedupe"),
    [(1, 1, "step", "auto"), (3, 1, "step", "auto"), (4, 1, "off", "auto"), (4, 2, "step", "never")],
)
def test_every_op_is_recorded_after_what_it_depends_on(
    gloo: ProcessPool, world_size: int, num_replicas: int, overlap: str, dedupe: str
) -> None:
    recordings = gloo.run(_record, num_replicas, overlap, dedupe, world_size=world_size)
    assert len({repr(each.timeline) for each in recordings}) == 1, "every rank has all of it"
    recording = recordings[0]
    validate(recording.program)
    assert sorted(recording.program) == list(range(world_size))
    owned = [
        name for named in recording.matrices.values() for op, names in named.items() if "newton" in op for name in names
    ]
    assert sorted(owned) == sorted(["a", "b", "c"] * num_replicas)
    starts: dict[tuple[str, tuple[int, ...]], set[float]] = {}
    for rank, spans in recording.timeline.spans.items():
        ends = {span.op.name: span.end for span in spans}
        assert {span.op.rank for span in spans} == {rank}
        assert sum(span.op.kind == OpKind.ADAMW for span in spans) == 1
        assert len(ends) == len(spans)
        for op, start, end in spans:
            assert 0 <= start <= end <= recording.timeline.makespan
            # A communication ends in a thread that may say so later than its waiter goes on: see below.
            assert op.lane == TRANSFER or all(ends[name] <= end + 0.05 for name in op.deps)
            if op.group and start < end:
                starts.setdefault((op.name, op.group), set()).add(start)
    assert all(len(times) == 1 for times in starts.values()), "a communication begins at once on all its ranks"
    if num_replicas == 2:  # Ranks of the world, not of the exchange group.
        assert {group for _, group in starts} == {(0, 1), (2, 3)}


def test_spans_wait_for_an_op_that_ends_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = TimelineRecorder(torch.device("cpu"))
    op = Op(kind="gather", key="3", rank=0, lane=TRANSFER)
    recorder.started(op)
    with monkeypatch.context() as patched:
        patched.setattr(timeline, "_LATEST_END_SECONDS", 0.01)
        with pytest.raises(RuntimeError, match=r"gather\[3\]"):
            recorder.spans()
    threading.Timer(0.05, recorder.ended, [op]).start()
    (span,) = recorder.spans()
    assert span.op is op and span.end - span.start >= 0.05


def test_an_optimizer_without_a_plan_cannot_be_recorded() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="take one step before"):
        record_step(ParallelMuon([nn.Parameter(torch.zeros(2, 2))]))
