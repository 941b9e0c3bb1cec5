"""Records when the ops of a real step begin and end on all ranks, as a timeline like the simulator's."""

from __future__ import annotations

import csv
import json
import socket
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_muon.comm.agreement import gather
from lightning_muon.optim.parallel_muon import ParallelMuon
from lightning_muon.optim.planned_optimizer import PlannedOptimizer, PlannedStep
from lightning_muon.pipeline.runtime import PipelineRuntime
from lightning_muon.schedule.pipeline import PipelineKind
from lightning_muon.schedule.program import COMPUTE, TRANSFER, Op, OpKind, Program, without_absent
from lightning_muon.schedule.simulate import Clock, Span, Timeline, simulate

_LATEST_END_SECONDS = 30.0
# Ops of a pipeline's step beside its program and the ops of a ParallelMuon; ranks are filled in later.
GRADIENT_NORM = Op(kind=PipelineKind.GRADIENT_NORM, key="all", rank=0, lane=TRANSFER)
WHOLE_STEP = Op(kind=PipelineKind.OPTIMIZER, key="all", rank=0)  # The step of an optimizer without ops of its own.
_OF_PIPELINE = {value for name, value in vars(PipelineKind).items() if name.isupper()}
_MESSAGES = (PipelineKind.ACTIVATION, PipelineKind.GRADIENT, PipelineKind.LOSS)
_WHOLE_GRADIENTS = (PipelineKind.REDUCE_GRAD, PipelineKind.TIED, PipelineKind.GRADIENT_NORM)


class TimelineRecorder:
    """Records when each op of the calling rank starts and ends; set it as ``executor.recorder``.

    On CUDA the clock is that of the device, synchronized with the host's once when recording begins.
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
        """The recorded spans, in order of issue, in seconds of the host's clock; waits until all ops have ended."""
        with self._changed:
            # A rank that waited for a communication continues a moment before the backend's thread reports its end.
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
    """A recorded step."""

    # Timeline of all ranks, in seconds since the last rank began the step. A communication begins when all ranks of its
    # group have reached it, as in `simulate`.
    timeline: Timeline
    program: Program  # The ops in the order in which they were issued; ranks are global ranks.
    matrices: dict[int, dict[str, list[str]]]  # Rank -> name of an op -> names of the matrices that it works on.


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


def record_step(optimizer: ParallelMuon) -> Recording:
    """Take one step and record it. Collective over the default group; every rank must call it."""
    recorder = StepRecorder(optimizer)
    with recorder.recording():
        optimizer.step()
    return recorder.result()


class StepRecorder:
    """Records one step inside of :meth:`recording`: the ops of an optimizer, and of the pipeline around it.

    Args:
        optimizer: Any optimizer; a ParallelMuon must have taken a step before, so that it has a plan.
        runtime: The pipeline of this rank.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, runtime: PipelineRuntime | None = None) -> None:
        self._optimizer, self._runtime = optimizer, runtime
        self._planned = optimizer._planned if isinstance(optimizer, PlannedOptimizer) else None
        if isinstance(optimizer, PlannedOptimizer) and self._planned is None:
            raise ValueError("the optimizer has no plan yet; take one step before a step is recorded")
        self._begun, self._recorded = 0.0, list[Span]()

    @contextmanager
    def recording(self) -> Generator[None]:
        """Context around the step. Collective over the default group; every rank must enter it."""
        told: list[Any] = [] if self._runtime is None else [self._runtime]
        device = self._optimizer.param_groups[0]["params"][0].device
        if self._planned is not None:
            told, device = [*told, self._planned.matrix_step.executor], self._planned.plan.device
        recorder = TimelineRecorder(device)

        def whole_step(*_: Any) -> None:
            if self._planned is None:
                recorder.started(WHOLE_STEP)
                recorder.ended(WHOLE_STEP)

        hook = self._optimizer.register_step_post_hook(whole_step)
        dist.barrier()
        self._begun = time.monotonic()
        try:
            for each in told:
                each.recorder = recorder
            yield
            self._recorded = recorder.spans()
        finally:
            hook.remove()
            for each in told:
                each.recorder = None

    def result(self) -> Recording:
        """The recording of all ranks. Collective over the default group; every rank must call it."""
        shift = _clock_shift()
        spans, matrices = described(self._recorded, self._planned, self._runtime, shift)
        return _merge(gather((self._begun + shift, spans, matrices), None))


def described(
    recorded: Sequence[Span], planned: PlannedStep | None, runtime: PipelineRuntime | None, shift: float
) -> tuple[list[Span], dict[str, list[str]]]:
    """The spans of a rank, with global ranks and moved by ``shift`` seconds, and the matrices of each op.

    ``planned`` and ``runtime`` are those of the optimizer and the pipeline that ran the ops. Local.
    """
    spans: list[Span] = []
    matrices: dict[str, list[str]] = {}
    gradients: tuple[str, ...] = ()  # Ops that complete the gradients: norm and optimizer wait for them.
    for op, start, end in recorded:
        bucket = None if planned is None else planned.plan.buckets.get(op.key)
        is_of_step = op.kind not in _OF_PIPELINE or op in (GRADIENT_NORM, WHOLE_STEP)
        if op == WHOLE_STEP:  # Only its end is known.
            start = max((span.end - shift for span in spans), default=start)
        matrices[op.name] = [bucket.group.jobs[index].matrix.name for index in op.items] if bucket else []
        group, deps = _world_ranks(op, planned, runtime), (*op.deps, *(gradients if is_of_step else ()))
        op = replace(op, rank=dist.get_rank() if dist.is_initialized() else 0, group=group, deps=deps)
        spans.append(Span(op, start + shift, end + shift))
        gradients += (op.name,) if op.kind in _WHOLE_GRADIENTS else ()
    return spans, matrices


def _world_ranks(op: Op, planned: PlannedStep | None, runtime: PipelineRuntime | None) -> tuple[int, ...]:
    """The group of an op in global ranks; empty if that is not known."""
    if op == GRADIENT_NORM:
        return tuple(range(dist.get_world_size()))
    axes = None
    if op.kind in _OF_PIPELINE:
        axes = runtime and runtime.group
    elif planned is not None and (bucket := planned.plan.buckets.get(op.key)) is not None:
        axes = bucket.group.axes
    if not op.group or axes is None or axes.group is None:
        return ()
    members = dist.get_process_group_ranks(axes.group)
    return tuple(members[member] for member in op.group)


class MeasuredSeconds:
    """Times of ops from several recorded steps: an op takes the median of all ops like it.

    Alike are the forwards, or backwards, of all micro-batches of a stage, and the same op of several steps. A message
    is recorded until its receiver takes it, so each one takes the time of the fastest between the same ranks.
    """

    def __init__(self, recordings: Sequence[Recording]) -> None:
        found: dict[Any, list[float]] = {}
        for recording in recordings:
            for spans in recording.timeline.spans.values():
                for op, start, end in spans:
                    found.setdefault(_alike(op), []).append(end - start)
        self._seconds = {key: min(all_) if key[0] == _MESSAGES else median(all_) for key, all_ in found.items()}

    def seconds(self, op: Op) -> float:
        """Seconds that an op takes once it has begun."""
        return self._seconds[_alike(op)]


def _alike(op: Op) -> tuple[Any, ...]:
    if op.kind in _MESSAGES:
        return _MESSAGES, *sorted(op.group)
    return op.kind, op.rank, op.items[0] if op.kind in _OF_PIPELINE and op.items else op.key


def _merge(everyone: Sequence[tuple[float, list[Span], dict[str, list[str]]]]) -> Recording:
    """Merge the data of all ranks (begin, spans, and matrices of each op) into one recording."""
    begun = max(start for start, _, _ in everyone)
    reached: dict[tuple[str, tuple[int, ...]], float] = {}
    for _, spans, _ in everyone:
        for op, start, _ in spans:
            key = op.name, op.group
            reached[key] = max(start, reached.get(key, start))
    timeline: dict[int, list[Span]] = {}
    # Messages of a pipeline, by (sender, receiver): the sender does not know when they arrive.
    arrived = {
        (op.name, op.group): end
        for _, spans, _ in everyone
        for op, _, end in spans
        if op.kind in _MESSAGES and op.rank == op.group[1]
    }
    for rank, (_, spans, _) in enumerate(everyone):
        timeline[rank] = []
        for op, start, end in spans:
            end = arrived.get((op.name, op.group), end)
            start = min(end, reached[op.name, op.group]) if op.group else start
            timeline[rank].append(Span(op, max(0.0, start - begun), max(0.0, end - begun)))
    return Recording(
        timeline=Timeline(timeline),
        program=without_absent({rank: [span.op for span in spans] for rank, spans in timeline.items()}),
        matrices={rank: named for rank, (_, _, named) in enumerate(everyone)},
    )


def write_part(
    folder: Path, recorded: Sequence[Span], planned: PlannedStep | None, *, step: int, rank: int, num_ranks: int
) -> None:
    """Write what this rank has recorded of a step to its own file, with times of its machine's clock; local."""
    spans, matrices = described(recorded, planned, None, time.time() - time.monotonic())
    content = {
        "step": step,
        "rank": rank,
        "num_ranks": num_ranks,
        "device_type": "cpu" if planned is None else planned.plan.device.type,
        "spans": [[asdict(op), start, end] for op, start, end in spans],
        "matrices": matrices,
    }
    draft = folder / f"timeline-{rank}.draft"
    draft.write_text(json.dumps(content), encoding="utf-8")
    draft.replace(folder / f"timeline-{rank}.json")


@contextmanager
def reading(path: Path) -> Generator[None]:
    """Context that names the file in its errors if something is missing there, or is not in the file's format."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, csv.Error) as error:
        raise ValueError(f"{path} is not what a run writes: {type(error).__name__}: {error}") from error


class _Part(NamedTuple):
    """What one rank has recorded of a step."""

    step: int
    rank: int
    num_ranks: int
    device_type: str
    spans: list[Span]
    matrices: dict[str, list[str]]

    @classmethod
    def read(cls, path: Path) -> _Part:
        with reading(path):
            content = json.loads(path.read_text(encoding="utf-8"))
            spans = [Span(_op(values), start, end) for values, start, end in content["spans"]]
            return cls(**content | {"spans": spans})


def read_parts(folder: Path) -> tuple[int, str, Recording] | None:
    """Read step, device type and recording from the files of all ranks in ``folder``; ``None`` if one lacks. Local.

    Clocks of several machines may differ by milliseconds.
    """
    parts = [_Part.read(path) for path in folder.glob("timeline-*.json")]
    # A rank may have been stopped in between.
    steps = [part.step for part in parts]
    complete = [part for part in parts if steps.count(part.step) == part.num_ranks]
    if not complete or not any(part.spans for part in complete):
        return None
    complete.sort(key=lambda part: part.rank)
    begun = min(start for part in complete for _, start, _ in part.spans)
    return complete[0].step, complete[0].device_type, _merge([(begun, each.spans, each.matrices) for each in complete])


def _op(values: dict[str, Any]) -> Op:
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return Op(**values)


def _clock_shift() -> float:
    """Seconds from this rank's clock to rank 0's, 0 on one machine. Collective; every rank must call it."""
    dist.barrier()  # Its end counts as one moment on all machines, with an error of less than its duration.
    moments = gather((socket.gethostname(), time.monotonic()), None)
    here, now = moments[dist.get_rank()]
    return 0.0 if here == moments[0][0] else moments[0][1] - now


def trace_events(recording: Recording, planned: Timeline | None = None) -> dict[str, Any]:
    """The recording in the format of Chrome's tracing, for https://ui.perfetto.dev: a process per rank and timeline."""
    timelines = {"measured": recording.timeline, **({} if planned is None else {"planned": planned})}
    events: list[dict[str, Any]] = []
    for number, (title, timeline) in enumerate(timelines.items()):
        for rank, spans in timeline.spans.items():
            process = rank + number * len(timeline.spans)
            name = f"rank {rank}" if planned is None else f"{title}: rank {rank}"
            lanes = list(dict.fromkeys((COMPUTE, TRANSFER, *(span.op.lane for span in spans))))
            events.append({"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}})
            for lane, its_name in enumerate(lanes):
                arguments = {"name": its_name}
                events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": lane, "args": arguments})
            for op, start, end in spans:
                arguments: dict[str, Any] = {"bytes": op.bytes, "matrices": recording.matrices[rank].get(op.name, [])}
                if op.kind == OpKind.NEWTON_SCHULZ:
                    arguments["gflop"] = op.cost / 1e9
                event = {"ph": "X", "name": op.name, "cat": op.kind, "pid": process, "tid": lanes.index(op.lane)}
                events.append({**event, "ts": 1e6 * start, "dur": 1e6 * (end - start), "args": arguments})
    idle = {f"idle share, {title}": timeline.idle for title, timeline in timelines.items()}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": idle}
