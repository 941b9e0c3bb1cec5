"""Recorded timelines: what every op of a real step took on all ranks, in the form of the simulator's."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_muon.comm.agreement import gather
from lightning_muon.monitor.recorder import TimelineRecorder
from lightning_muon.optim.matrix_step import MatrixStep
from lightning_muon.optim.parallel_muon import ParallelMuon
from lightning_muon.schedule.draw import draw_timelines
from lightning_muon.schedule.program import COMPUTE, TRANSFER, Op, Program
from lightning_muon.schedule.simulate import Clock, Span, Timeline, simulate


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A recorded step."""

    # Timeline of all ranks, in seconds since the last rank began the step. A communication begins when all ranks of its
    # group have reached it, as in `simulate`.
    timeline: Timeline
    program: Program  # The ops in the order in which they were issued; ranks are global ranks.

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        return self.timeline.makespan


def record_step(optimizer: ParallelMuon) -> Recording:
    """Take one step and record it; it must not be the first. Collective over all ranks, which are on one machine."""
    planned = optimizer._planned
    if planned is None:
        raise ValueError("the optimizer has no plan yet; take one step before a step is recorded")
    recorder, executor = TimelineRecorder(planned.plan.device), planned.executor
    dist.barrier()
    begun = time.monotonic()
    executor.recorder = recorder
    optimizer.step()
    executor.recorder = None
    spans = [
        Span(replace(op, rank=dist.get_rank(), group=_world_ranks(op, planned)), start, end)
        for op, start, end in recorder.spans()
    ]
    return merge(gather((begun, spans), None))


def _world_ranks(op: Op, planned: MatrixStep) -> tuple[int, ...]:
    """The group of an op in global ranks."""
    bucket = planned.plan.buckets.get(op.key)
    if not op.group or bucket is None or bucket.group.axes.group is None:
        return ()
    members = dist.get_process_group_ranks(bucket.group.axes.group)
    return tuple(members[member] for member in op.group)


def merge(everyone: Sequence[tuple[float, list[Span]]]) -> Recording:
    """Merge the data of all ranks, begin and spans, into one recording."""
    begun = max(start for start, _ in everyone)
    reached: dict[tuple[str, tuple[int, ...]], float] = {}
    for _, spans in everyone:
        for op, start, _ in spans:
            key = op.name, op.group
            reached[key] = max(start, reached.get(key, start))
    timeline: dict[int, list[Span]] = {}
    for rank, (_, spans) in enumerate(everyone):
        timeline[rank] = []
        for op, start, end in spans:
            start = min(end, reached[op.name, op.group]) if op.group else start
            timeline[rank].append(Span(op, max(0.0, start - begun), max(0.0, end - begun)))
    return Recording(
        timeline=Timeline(timeline),
        program={rank: [span.op for span in spans] for rank, spans in timeline.items()},
    )


def predict(recording: Recording, cost: Clock, *, device_type: str) -> Timeline:
    """Simulate the recorded program with a cost model, or with measured seconds.

    A CPU starts no transfer while it computes.
    """
    return simulate(host_order(recording.program) if device_type == "cpu" else recording.program, cost)


def host_order(program: Program) -> Program:
    """Make each transfer wait for the compute op before it: on a CPU a host that computes starts nothing."""
    ordered: Program = {}
    for rank, ops in program.items():
        last: str | None = None
        ordered[rank] = []
        for op in ops:
            if op.lane == COMPUTE:
                last = op.name
            elif last is not None and last not in op.deps:
                op = replace(op, deps=(*op.deps, last))
            ordered[rank].append(op)
    return ordered


def write(folder: Path, recording: Recording, predicted: Timeline, title: str) -> None:
    """Write ``trace.json`` for https://ui.perfetto.dev, and a picture of what was measured above what was predicted."""
    folder.mkdir(parents=True, exist_ok=True)
    timelines = {"measured": recording.timeline, "predicted": predicted}
    (folder / "trace.json").write_text(json.dumps(trace_events(timelines)), encoding="utf-8")
    for suffix in (".png", ".svg"):
        draw_timelines(timelines, folder / f"timeline{suffix}", title=title)


def trace_events(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """Timelines in the format of Chrome's tracing: a process per rank and timeline, a thread per lane."""
    events: list[dict[str, Any]] = []
    for number, (title, timeline) in enumerate(timelines.items()):
        for rank, spans in timeline.spans.items():
            process = rank + number * len(timeline.spans)
            lanes = list(dict.fromkeys((COMPUTE, TRANSFER, *(span.op.lane for span in spans))))
            names = {"process_name": [f"{title}: rank {rank}"], "thread_name": lanes}
            events += [
                {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
                for kind, named in names.items()
                for thread, name in enumerate(named)
            ]
            for op, start, end in spans:
                arguments = {"bytes": op.bytes, "gflop": op.cost / 1e9}
                event = {"ph": "X", "name": op.name, "cat": op.kind, "pid": process, "tid": lanes.index(op.lane)}
                events.append({**event, "ts": 1e6 * start, "dur": 1e6 * (end - start), "args": arguments})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
