"""When the ops of a real step began and ended, on all ranks: the same kind of timeline as the simulator's."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from lightning_muon.comm.agreement import gather
from lightning_muon.optim.parallel_muon import ParallelMuon
from lightning_muon.schedule.cost import CostModel
from lightning_muon.schedule.program import COMPUTE, TRANSFER, Op, OpKind, Program, without_absent
from lightning_muon.schedule.simulate import Span, Timeline, simulate

_LATEST_END_SECONDS = 30.0


class TimelineRecorder:
    """Notes when each op of the calling rank starts and ends; an executor is told by ``executor.recorder = recorder``.

    On CUDA the clock is that of the device, tied to the host's by one synchronization when recording begins.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._changed = threading.Condition()
        self._starts: dict[Op, Any] = {}
        self._ends: dict[Op, Any] = {}
        if self._is_cuda:
            torch.cuda.synchronize()
            self._origin = (time.monotonic(), self._now())
            torch.cuda.synchronize()

    def started(self, op: Op) -> None:
        """Call it before the action, with the stream of the op current on CUDA."""
        self._starts[op] = self._now()

    def ended(self, op: Op) -> None:
        """Call it when the op has ended (CPU, maybe in a thread of the backend) or its end is queued (CUDA)."""
        now = self._now()
        with self._changed:
            self._ends[op] = now
            self._changed.notify_all()

    def spans(self) -> list[Span]:
        """What was recorded, in order of issue, in seconds of the host's clock; waits until all ops have ended."""
        with self._changed:
            # A rank that waited for a communication goes on a moment before the backend's thread says that it ended.
            if not self._changed.wait_for(lambda: len(self._ends) == len(self._starts), _LATEST_END_SECONDS):
                missing = [op.name for op in self._starts if op not in self._ends]
                raise RuntimeError(f"{missing[:4]} had not ended {_LATEST_END_SECONDS} s after the step")
            if self._is_cuda:
                torch.cuda.synchronize()
            return [Span(op, self._seconds(at), self._seconds(self._ends[op])) for op, at in self._starts.items()]

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, moment: Any) -> float:
        if not self._is_cuda:
            return moment
        seconds, event = self._origin
        return seconds + event.elapsed_time(moment) / 1e3


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A step as it ran."""

    # Of all ranks, in seconds since the last rank began the step. A communication begins when all ranks of its group
    # have reached it, as in `simulate`.
    timeline: Timeline
    program: Program  # The ops in the order in which they were issued; ranks are global ranks.
    matrices: dict[int, dict[str, list[str]]]  # Rank -> name of an op -> names of the matrices that it works on.


def predict(recording: Recording, cost: CostModel, *, device_type: str) -> Timeline:
    """The timeline of the recorded program from a cost model. A CPU starts no transfer while it computes."""
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


def record_step(optimizer: ParallelMuon) -> Recording:
    """Take one step and say when everything happened. Collective over the default group; every rank must call it."""
    bound = optimizer._bound
    if bound is None:
        raise ValueError("the optimizer has no plan yet; take one step before a step is recorded")
    executor = bound.matrix_step.executor
    recorder = executor.recorder = TimelineRecorder(bound.plan.device)
    dist.barrier()
    begun = time.monotonic()
    try:
        optimizer.step()
        recorded = recorder.spans()
    finally:
        executor.recorder = None
    shift, rank = _clock_shift(), dist.get_rank()
    spans: list[Span] = []
    matrices: dict[str, list[str]] = {}
    for op, start, end in recorded:
        bucket, group = bound.plan.buckets.get(op.key), op.group
        matrices[op.name] = []
        if bucket is not None:
            matrices[op.name] = [bucket.group.jobs[index].matrix.name for index in op.items]
            # Ranks of the world, not of the exchange group.
            axes = bucket.group.axes
            members = (rank,) if axes.group is None else tuple(dist.get_process_group_ranks(axes.group))
            group = tuple(members[member] for member in op.group)
        spans.append(Span(replace(op, rank=rank, group=group), start + shift, end + shift))
    return _merge(gather((begun + shift, spans, matrices), None))


def _merge(everyone: Sequence[tuple[float, list[Span], dict[str, list[str]]]]) -> Recording:
    """One recording of what each rank gives: when it began, its spans, and the matrices of its ops."""
    begun = max(start for start, _, _ in everyone)
    reached: dict[tuple[str, tuple[int, ...]], float] = {}
    for _, spans, _ in everyone:
        for op, start, _ in spans:
            key = op.name, op.group
            reached[key] = max(start, reached.get(key, start))
    timeline: dict[int, list[Span]] = {}
    for rank, (_, spans, _) in enumerate(everyone):
        timeline[rank] = []
        for op, start, end in spans:
            start = min(end, reached[op.name, op.group]) if op.group else start
            timeline[rank].append(Span(op, max(0.0, start - begun), max(0.0, end - begun)))
    return Recording(
        timeline=Timeline(timeline),
        program=without_absent({rank: [span.op for span in spans] for rank, spans in timeline.items()}),
        matrices={rank: named for rank, (_, _, named) in enumerate(everyone)},
    )


def _clock_shift() -> float:
    """Seconds from this rank's clock to rank 0's, 0 on one machine. Collective; every rank must call it."""
    dist.barrier()  # Ranks of several machines take its end for one moment, which is off by less than it takes.
    moments = gather((socket.gethostname(), time.monotonic()), None)
    here, now = moments[dist.get_rank()]
    return 0.0 if here == moments[0][0] else moments[0][1] - now


def trace_events(recording: Recording) -> dict[str, Any]:
    """The recording in the format of Chrome's tracing, for https://ui.perfetto.dev: a process per rank."""
    events: list[dict[str, Any]] = []
    for rank, spans in recording.timeline.spans.items():
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        for lane, name in enumerate(("compute", "transfer")):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": name}})
        for op, start, end in spans:
            arguments: dict[str, Any] = {"bytes": op.bytes, "matrices": recording.matrices[rank].get(op.name, [])}
            if op.kind == OpKind.NEWTON_SCHULZ:
                arguments["gflop"] = op.cost / 1e9
            event = {"ph": "X", "name": op.name, "cat": op.kind, "pid": rank, "tid": int(op.lane == TRANSFER)}
            events.append({**event, "ts": 1e6 * start, "dur": 1e6 * (end - start), "args": arguments})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
