"""How well a calibrated plan predicts a real optimizer step, on gloo processes, or under torchrun, of one machine.

    python -m benchmarks.plan_accuracy --ranks 2 4
    python -m benchmarks.plan_accuracy --ranks 2 --shapes t5-small --rounds 1 --out trace

Each round calibrates (a measurement on a sample of the matrices, with all ranks at work) and then records steps of the
whole model on random weights, serial and with overlap, in the same processes. The fastest step counts, in the
calibration too, because other work on the machine only ever adds; the ratio of each round is taken by itself and the
median of the rounds is reported.

--out writes what the last round has measured: cost.json, which ``lightning-muon plan --cost`` reads; trace.json with
all ops of all ranks, measured and predicted, for https://ui.perfetto.dev; and timeline.png and .svg of the same.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, linear_regression, median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import mesh_of, run_on_ranks, sharded_muon, this_device
from benchmarks.tables import markdown, origin, parser_of
from lightning_muon.comm.agreement import gather
from lightning_muon.comm.collectives import AxisGroup, axis_group, start_all_to_all
from lightning_muon.config import MuonConfig
from lightning_muon.math.newton_schulz import JORDAN, NewtonSchulz
from lightning_muon.monitor.step_monitor import TimelineRecorder
from lightning_muon.optim.parallel_muon import ParallelMuon
from lightning_muon.params.layout import matrices_in
from lightning_muon.params.shapes import ModelShapes, ParameterShape, read_shapes
from lightning_muon.schedule.draw import draw_timelines
from lightning_muon.schedule.program import COMPUTE, TRANSFER, OpKind, Program
from lightning_muon.schedule.simulate import CostModel, Span, Timeline, simulate

SCHEDULES = {"serial": {"overlap": "off"}, "overlapped": {"overlap": "step"}}
# Larger sides are cut to this: smaller products already reach the full rate, and the measurement stays short.
_LARGEST_SIDE = {"cpu": 1024, "cuda": 8192}
_MOST_SHAPES, _MOST_PER_RANK = 4, 32
_MOST_FLOPS_PER_RANK = {"cpu": 40e9, "cuda": 40e12}
# Two sizes of buckets, to separate the constant cost of an op from the cost of its bytes.
_BUCKET_BYTES = (MuonConfig.bucket_bytes, MuonConfig.bucket_bytes // 8)
_NUM_STEPS = 5
_LARGEST_CORRECTION, _NUM_HALVINGS = 4.0, 30
_MESSAGE_BYTES, _NUM_MESSAGES = (2**16, 2**22), 15


def main() -> None:
    arguments = parse_arguments()
    is_first = os.environ.get("RANK", "0") == "0"
    rows: list[list[str]] = []
    for name in arguments.shapes:
        model = read_shapes(name)
        for num_ranks in arguments.ranks:
            rounds = run_on_ranks(measure, model, arguments.rounds, num_ranks=num_ranks)
            rows += [[name, str(num_ranks), each, *figures([found[each] for found in rounds])] for each in SCHEDULES]
            if arguments.out is not None and is_first:
                title = f"{model.name} on {num_ranks} ranks"
                write_last(arguments.out, title, rounds[-1]["overlapped"])
    if is_first:
        ratios = "predicted / measured, rounds"
        print(markdown(["shapes", "ranks", "schedule", "measured ms", "predicted ms", ratios, "median"], rows))
        print(origin(__spec__.name))


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, {"rounds": 5})
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--shapes", nargs="+", default=["t5-small"], help="names that plan --shapes takes, or files")
    parser.add_argument("--out", type=Path, help="folder for the cost model, trace and pictures of the last round")
    return parser.parse_args()


# The fastest of the recorded steps, the cost model that was measured just before, and the same ops simulated.
Comparison = tuple[Timeline, CostModel, Timeline]


def record_step(optimizer: ParallelMuon) -> Timeline:
    """Take one step, not the first, and record it. Collective over all ranks, which are on one machine."""
    planned = optimizer._planned
    if planned is None:
        raise ValueError("the optimizer has no plan yet; take one step before a step is recorded")
    recorder, executor = TimelineRecorder(planned.plan.device), planned.executor
    dist.barrier()
    begun = time.monotonic()
    executor.recorder = recorder
    optimizer.step()
    executor.recorder = None
    spans = [Span(replace(op, rank=dist.get_rank()), start, end) for op, start, end in recorder.spans()]
    return merge(gather((begun, spans), None))


def merge(everyone: Sequence[tuple[float, list[Span]]]) -> Timeline:
    """The ops of all ranks in the order in which they were issued, in seconds since the last rank began the step.

    A communication begins when all ranks of its group have reached it, as in :func:`simulate`. ``everyone`` has the
    begin of the step on each rank, and its ops.
    """
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
    return Timeline(timeline)


def predict(recorded: Timeline, cost: CostModel) -> Timeline:
    """Simulate the recorded ops with a cost model. A CPU starts no transfer while it computes."""
    program = {rank: [span.op for span in spans] for rank, spans in recorded.spans.items()}
    return simulate(host_order(program) if this_device().type == "cpu" else program, cost)


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


def measure(model: ModelShapes, num_rounds: int) -> list[dict[str, Comparison]]:
    """A comparison for each schedule in each round. Collective; every rank must call it."""
    rounds: list[dict[str, Comparison]] = []
    for _ in range(num_rounds):
        cost = calibrate(model)
        rounds.append({})
        for schedule, options in SCHEDULES.items():
            recording = fastest_step(model, options)
            rounds[-1][schedule] = recording, cost, predict(recording, cost)
    return rounds


def figures(found: Sequence[Comparison]) -> list[str]:
    measured, predicted = [each[0].makespan for each in found], [each[2].makespan for each in found]
    ratios = [one / other for one, other in zip(predicted, measured, strict=True)]
    times = [f"{1e3 * median(seconds):.0f}" for seconds in (measured, predicted)]
    return [*times, " ".join(f"{ratio:.2f}" for ratio in ratios), f"{median(ratios):.2f}"]


def write_last(folder: Path, title: str, found: Comparison) -> None:
    recording, cost, predicted = found
    folder.mkdir(parents=True, exist_ok=True)
    timelines = {"measured": recording, "predicted": predicted}
    (folder / "cost.json").write_text(json.dumps(asdict(cost)) + "\n", encoding="utf-8")
    (folder / "trace.json").write_text(json.dumps(trace_events(timelines)), encoding="utf-8")
    for suffix in (".png", ".svg"):
        draw_timelines(timelines, folder / f"timeline{suffix}", title=title)
    print(f"wrote cost.json (for plan --cost), trace.json, timeline.png and timeline.svg to {folder}")


def calibrate(model: ModelShapes) -> CostModel:
    """Measure Newton-Schulz, memory and links in less than 20 seconds, while all ranks work at once.

    Fits the rates to ops and whole steps of ParallelMuon on a sample of the matrices, so that packing and contention
    for cores count, and times all-to-alls. Collective; every rank must call it.
    """
    device_type = this_device().type
    sample = sample_matrices(model, dist.get_world_size(), device_type)
    serial, overlapped, pieces = (
        fastest_step(sample, {"overlap": overlap, "bucket_bytes": bucket_bytes})
        for overlap, bucket_bytes in (("off", _BUCKET_BYTES[0]), ("step", _BUCKET_BYTES[0]), ("off", _BUCKET_BYTES[1]))
    )
    spans = [span for step in (serial, pieces) for each in step.spans.values() for span in each]
    group = axis_group(mesh_of(1, device_type), (1,))
    # Without links, a link that costs nothing.
    points = [_time_message(group, size) for size in _MESSAGE_BYTES] if group.size > 1 else [(1.0, 1e-12)]
    per_byte, latency = map(fmean, zip(*gather(fit_line(points), None), strict=True))  # The same on all ranks.
    links = {"bandwidth": [1 / per_byte], "latency_seconds": [latency]}
    return fit_steps(CostModel.from_dict(fit_compute(spans) | links), (serial, overlapped))


def sample_matrices(model: ModelShapes, num_ranks: int, device_type: str) -> ModelShapes:
    """A few matrices per rank with about the mix of the model, the largest cut to size."""
    side, cut = _LARGEST_SIDE[device_type], Counter[tuple[int, int]]()
    for parameter in model.parameters:
        if parameter.kind != "elementwise" and not parameter.frozen:
            cut.update((min(rows, side), min(cols, side)) for _, rows, cols in matrices_in(parameter.shape, parameter))
    newton_schulz = NewtonSchulz((JORDAN,) * MuonConfig.ns_steps, torch.float32)
    work = {shape: count * newton_schulz.flops(*shape) for shape, count in cut.items()}
    chosen = sorted(work, key=lambda shape: (-work[shape], shape))[:_MOST_SHAPES]
    total = sum(cut[shape] for shape in chosen)
    mean_flops = sum(work[shape] for shape in chosen) / total
    per_rank = min(_MOST_PER_RANK, max(1, int(_MOST_FLOPS_PER_RANK[device_type] / mean_flops)))
    parameters = [
        ParameterShape(name=f"{shape[0]}x{shape[1]}.{number}", shape=shape, kind="matrix")
        for shape in chosen
        for number in range(num_ranks * max(1, round(per_rank * cut[shape] / total)))
    ]
    return ModelShapes(name="sample", source="", parameters=tuple(parameters))


def fastest_step(model: ModelShapes, options: Mapping[str, Any]) -> Timeline:
    """The fastest of some steps after a first one. Collective; every rank must call it."""
    fixed = {"dedupe": "never", "error_if_nonfinite": False}
    optimizer = sharded_muon(model.parameters, 1, this_device().type, **options, **fixed)
    optimizer.step()
    return min((record_step(optimizer) for _ in range(_NUM_STEPS)), key=lambda each: each.makespan)


def fit_compute(spans: Sequence[Span]) -> dict[str, float]:
    """Fit the memory rate by least squares to elementwise ops, and the FLOP/s to the remaining Newton-Schulz time."""
    elementwise = [
        (span.op.bytes, span.end - span.start) for span in spans if span.op.kind in (OpKind.MOMENTUM, OpKind.UPDATE)
    ]
    per_byte, op_seconds = fit_line(elementwise)
    products = [span for span in spans if span.op.kind == OpKind.NEWTON_SCHULZ and span.op.cost]
    seconds = sum(span.end - span.start - op_seconds - per_byte * span.op.bytes for span in products)
    rate = sum(span.op.cost for span in products) / max(seconds, 1e-9)
    return {"flops_per_second": rate, "memory_bytes_per_second": 1 / per_byte, "op_seconds": op_seconds}


def fit_steps(cost: CostModel, recordings: Sequence[Timeline]) -> CostModel:
    """Correct ``flops_per_second`` so that predicted steps take as long as measured ones, in geometric mean."""
    # A fit to single ops gives too short steps: ranks share cores, and wait for the last one at each communication.
    begun = [min(spans[0].start for spans in each.spans.values() if spans) for each in recordings]
    measured = [each.makespan - start for each, start in zip(recordings, begun, strict=True)]

    def surplus(factor: float) -> float:
        changed = replace(cost, flops_per_second=factor * cost.flops_per_second)
        predicted = [predict(recording, changed).makespan for recording in recordings]
        return sum(math.log(each / seconds) for each, seconds in zip(predicted, measured, strict=True))

    low, high = -math.log(_LARGEST_CORRECTION), math.log(_LARGEST_CORRECTION)
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if surplus(math.exp(middle)) > 0 else (low, middle)
    return replace(cost, flops_per_second=math.exp((low + high) / 2) * cost.flops_per_second)


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit ``y = slope x + constant`` by least squares, with slope > 0 and constant >= 0; return both."""
    xs, ys = zip(*points, strict=True)
    if len(set(xs)) > 1:
        slope, constant = linear_regression(xs, ys)
        if slope > 0 and constant >= 0:
            return slope, constant
    # Too noisy, or all of one size: attribute all of the time to the size.
    return fmean(ys) / fmean(xs), 0.0


def _time_message(group: AxisGroup, size: int) -> tuple[float, float]:
    """Time an all-to-all: (bytes sent by a rank, seconds). Collective over ``group``; every rank must call it."""
    device = this_device()
    counts = [0 if peer == group.rank else size // (group.size - 1) for peer in range(group.size)]
    out, into = (torch.empty(sum(counts), dtype=torch.uint8, device=device) for _ in range(2))
    seconds: list[float] = []
    for _ in range(_NUM_MESSAGES):
        dist.barrier(group.group)
        started = time.monotonic()
        for work in start_all_to_all(out, counts, into, counts, group):
            work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - started)
    # The first ones open connections.
    return float(sum(counts)), median(seconds[_NUM_MESSAGES // 3 :])


if __name__ == "__main__":
    main()
