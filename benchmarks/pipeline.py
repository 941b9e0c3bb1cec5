"""Time of training steps with each pipeline schedule, measured and predicted.

    python -m benchmarks.pipeline                         # 4 ranks, whose arithmetic is a wait
    python -m benchmarks.pipeline --compute real          # 2 ranks
    python -m benchmarks.pipeline --compute real --schedules 1f1b zb_h1 --draw FOLDER    # and pictures of a step

Starts gloo processes on this machine (one thread each), which train a stack of equal layers with ParallelMuon, one
stage or two on each rank, and takes turns between the schedules. A layer that waits takes the same time whatever the
cores of the machine do, as one does that runs on a device of its own; messages, autograd and the runtime are the real
ones. The simulator gets what the same run measures, by the ranges that torch.profiler sees: seconds of each kind of op
in each stage, of the host between ops, of a message and of an agreement of all ranks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.plan_accuracy import host_order
from benchmarks.ranks import run_on_ranks
from benchmarks.tables import markdown, origin, parser_of
from lightning_muon import ModeOptions, Options
from lightning_muon.comm.agreement import gather
from lightning_muon.engine.training import TrainingEngine
from lightning_muon.schedule.draw import draw_timelines
from lightning_muon.schedule.pipeline import Pipeline, PipelineKind, add_reduce_grad, build_program, make_order
from lightning_muon.schedule.program import Op, Program
from lightning_muon.schedule.simulate import Span, Timeline, simulate

SCHEDULES = ("1f1b", "gpipe", "zb_h1", "zb_1p", "zb_2p", "interleaved_1f1b", "zb_v", "v_half", "v_min")
MESSAGES = (PipelineKind.ACTIVATION, PipelineKind.GRADIENT, PipelineKind.LOSS)
COMPUTE = (PipelineKind.FORWARD, PipelineKind.BACKWARD, PipelineKind.BACKWARD_INPUT, PipelineKind.BACKWARD_WEIGHT)
PREFIX = "lightning_muon::"
Batch = tuple[Tensor, Tensor]
Key = tuple[str, int]  # Kind of op, and its stage, or rank for an op of a whole rank.


class _Waits(torch.autograd.Function):
    """Hands on; forward and backward take time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradient, None, None


class Wait(nn.Module):
    """A layer whose forward, and both parts of whose backward, take so many seconds each."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        # In the first layer nothing asks for the gradient of the input; it shall take as long as the others.
        backward_weight = self.seconds if x.requires_grad else 2 * self.seconds
        return nn.functional.linear(
            _Waits.apply(x, self.seconds, self.seconds), _Waits.apply(self.weight, 0.0, backward_weight)
        )


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Stack(nn.Sequential):
    """All layers."""

    def pipeline_loss(self, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return (output - target).square().sum(), target.numel()


class Ranges:
    """The ranges of one call, by the profiler: name -> begin without what it waited, and end, in seconds of the host.

    Args:
        action: What is profiled, on this rank.
    """

    def __init__(self, action: Callable[[], object]) -> None:
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            now = time.monotonic()
            with record_function("origin"):
                pass
            action()
        events = {event.name: event.time_range for event in profiled.events() or ()}
        shift = now - 1e-6 * events["origin"].start
        whole = {
            name.removeprefix(PREFIX): (shift + 1e-6 * its.start, shift + 1e-6 * its.end)
            for name, its in events.items()
            if name.startswith((PREFIX, "Optimizer.step#"))
        }
        self.waits = {name: its for name, its in whole.items() if name.startswith("wait")}
        self.spans: dict[str, tuple[float, float]] = {}
        for name, (begin, end) in whole.items():
            waited = [its[1] for its in self.waits.values() if begin <= its[0] and its[1] <= end]
            self.spans[name] = max([begin, *waited]), end
        step = next((name for name in whole if name.startswith("Optimizer.step#")), None)
        self.step = None if step is None else whole[step]

    def host_seconds(self, ops: Sequence[Op]) -> float:
        """What the host does between the ops of a batch that compute, to post messages among it, for each of them."""
        times = [self.spans[op.name] for op in ops if op.kind in COMPUTE]
        begin, end = (limit(time[place] for time in times) for place, limit in ((0, min), (1, max)))
        waited = sum(last - first for first, last in self.waits.values() if begin <= first and last <= end)
        return (end - begin - waited - sum(last - first for first, last in times)) / len(times)


class Contender:
    """A model in a schedule of its own, and its optimizer."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.name = name
        size = dist.get_world_size()
        options = Options(
            pipeline_size=size, pipeline_schedule=name, pipeline_microbatches=arguments.microbatches, sharding="none"
        )
        if arguments.compute == "wait":
            model = Stack(*(Wait(arguments.width, 1e-3 * arguments.milliseconds) for _ in range(2 * size)))
        else:
            model = Stack(*(Block(arguments.width) for _ in range(8 * size)))
        meshes = options.make("cpu", num_nodes=1, num_processes=size)
        self.engine = TrainingEngine(
            model, options, meshes, mode_options=ModeOptions(), info=lambda _: None, warn=lambda _: None
        )
        self.engine.shard(torch.device("cpu"))
        (self.optimizer,) = self.engine.attach([torch.optim.AdamW(model.parameters(), lr=1e-4)], source="benchmark")
        problem = Pipeline(
            num_ranks=size, num_microbatches=arguments.microbatches, stages_per_rank=options.stages_per_rank
        )
        self.program = add_reduce_grad(build_program(make_order(name, problem), problem, tells_loss=True))

    def step(self, batch: Batch) -> None:
        self.engine.run_pipeline(batch)
        self.engine.step(self.optimizer, lambda optimizer: optimizer.step())
        self.optimizer.zero_grad()

    def timed(self, batch: Batch, number: int) -> float:
        """Seconds of each of so many steps in a row, from the start on all ranks to the end on the last one."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(number):
            self.step(batch)
        return max(gather(time.perf_counter() - start, None)) / number

    def measure_ops(self, batch: Batch) -> tuple[dict[Key, float], Ranges]:
        """Of one step on this rank: median seconds of each kind of op in each stage, with its share of the host's."""
        dist.barrier()
        ranges, own = Ranges(lambda: self.step(batch)), self.program[dist.get_rank()]
        assert ranges.step is not None
        step_seconds = ranges.step[1] - ranges.step[0]
        found: dict[Key, list[float]] = {(PipelineKind.OPTIMIZER, dist.get_rank()): [step_seconds]}
        host_seconds = ranges.host_seconds(own)
        for op in own:
            if op.kind in COMPUTE:
                begin, end = ranges.spans[op.name]
                found.setdefault((op.kind, op.items[0]), []).append(end - begin + host_seconds)
        return {key: statistics.median(values) for key, values in found.items()}, ranges

    def predicted(self, costs: Measured, num_steps: int) -> Timeline:
        return simulate(host_order(in_a_row(self.program, num_steps)), costs)

    def measured(self, ranges: Ranges) -> Timeline:
        """The step of all ranks; a message ends when its receiver has waited for it. Collective; all must call it."""
        everyone = gather((ranges.spans, ranges.waits, ranges.step), None)
        begun = min(begin for spans, _, _ in everyone for begin, _ in spans.values())
        timeline: dict[int, list[Span]] = {}
        for rank, ops in self.program.items():
            spans, _, step = everyone[rank]
            timeline[rank] = [Span(op, *spans[op.name]) for op in ops if not op.group]
            for op in (op for op in ops if op.kind in MESSAGES):
                sender, receiver = op.group
                takers = [each.key for each in self.program[receiver] if op.name in each.deps]
                waits = everyone[receiver][1]
                taken = next((waits[key][1] for each in takers if (key := f"wait[{each}]") in waits), None)
                begin, end = everyone[sender][0][op.name]
                timeline[rank].append(Span(op, begin, max(begin, taken or end)))
            if step is not None:
                timeline[rank].append(Span(Op(kind=PipelineKind.OPTIMIZER, key="all", rank=rank), *step))
        return Timeline(
            {rank: [Span(op, a - begun, b - begun) for op, a, b in spans] for rank, spans in timeline.items()}
        )


@dataclass(frozen=True)
class Measured:
    """What an op takes on paper."""

    seconds_of: Mapping[Key, float]  # On one rank alone.
    message: float
    agreement: float  # Of all ranks.

    def seconds(self, op: Op) -> float:
        if op.kind in MESSAGES:
            return self.message
        return self.agreement if op.group else self.seconds_of.get((op.kind, op.items[0] if op.items else op.rank), 0.0)


def in_a_row(program: Program, num_steps: int) -> Program:
    """The program so many times, each time with the comparison of batches before and the optimizer's step behind it."""
    rows: Program = {rank: [] for rank in program}
    for rank, ops in program.items():
        before: tuple[str, ...] = ()  # The optimizer's step.
        for step in range(num_steps):
            whole = Op(kind="", key=str(step), rank=rank, group=tuple(program))
            compared = replace(whole, kind="compare", lane="compare", deps=before)
            rows[rank].append(compared)
            for op in ops:
                if op.group:  # From the first message on.
                    before = (compared.name,)
                deps = tuple(name.replace("[", f"[{step} ") for name in op.deps)
                rows[rank].append(replace(op, key=f"{step} {op.key}", deps=(*deps, *before)))
            before = tuple(op.name for op in rows[rank][-len(ops) :] if op.kind == PipelineKind.REDUCE_GRAD)
            rows[rank].append(replace(whole, kind=PipelineKind.OPTIMIZER, deps=before, group=()))
            before = (rows[rank][-1].name,)
    return rows


def main() -> None:
    numbers = {"microbatches": 8, "steps": 4, "rounds": 3}
    parser = parser_of(__doc__, numbers | {"milliseconds": 6.0})  # Of each pass of a layer; a rank has two.
    parser.add_argument("--compute", choices=("wait", "real"), default="wait")
    parser.add_argument("--ranks", type=int, help="default: 4, and 2 with --compute real")
    parser.add_argument("--rows", type=int, help="of a micro-batch; default: 16, and 256 with --compute real")
    parser.add_argument("--width", type=int, help="default: 64, and 192 with --compute real")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--draw", type=Path, help="folder for pipeline-SCHEDULE.svg, a step above its prediction")
    arguments = parser.parse_args()
    defaults = {"wait": {"ranks": 4, "rows": 16, "width": 64}, "real": {"ranks": 2, "rows": 256, "width": 192}}
    for name, value in defaults[arguments.compute].items():
        setattr(arguments, name, getattr(arguments, name) or value)
    print(run_on_ranks(worker, arguments, num_ranks=arguments.ranks))
    print(origin(__spec__.name))


def worker(arguments: argparse.Namespace) -> str:
    """The table. Collective; every rank must call it."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    size = arguments.rows * arguments.microbatches, arguments.width
    batch = torch.randn(size, generator=generator), torch.randn(size, generator=generator)
    contenders = [Contender(name, arguments) for name in dict.fromkeys(("1f1b", *arguments.schedules))]
    table = compare_schedules(contenders, batch, arguments)
    for contender in contenders:
        contender.engine.close()
    return table


def medians(found: Sequence[Mapping[Key, float]], arguments: argparse.Namespace) -> Measured:
    """What all ranks have found in several rounds. Collective; every rank must call it."""
    own = {key: statistics.median(each[key] for each in found) for key in found[0]}
    everyone = {key: value for each in gather(own, None) for key, value in each.items()}
    return Measured(everyone, *link_seconds(arguments))


def link_seconds(arguments: argparse.Namespace) -> tuple[float, float]:
    """Of an activation from the first rank to the second, half of there and back; and of an agreement of all ranks."""
    rank, tensor = dist.get_rank(), torch.zeros(arguments.rows, arguments.width)
    words = torch.zeros(6, dtype=torch.int64)

    def there_and_back() -> None:
        if rank < 2:
            first, second = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)
            first(tensor, 1 - rank)
            second(tensor, 1 - rank)

    def repeated(action: Callable[[], object]) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(20):
            action()
        return gather((time.perf_counter() - start) / 20, None)[0]

    return repeated(there_and_back) / 2, repeated(lambda: dist.all_reduce(words))


def compare_schedules(contenders: Sequence[Contender], batch: Batch, arguments: argparse.Namespace) -> str:
    """A table: a step alone, and steps in a row."""
    numbers = (1, arguments.steps)
    seconds: dict[tuple[str, int], list[float]] = {(each.name, number): [] for each in contenders for number in numbers}
    costs: dict[str, list[dict[Key, float]]] = {each.name: [] for each in contenders}
    steps: dict[str, list[Timeline]] = {each.name: [] for each in contenders}
    for each in contenders:
        each.timed(batch, 2)  # Warms up.
    for _ in range(arguments.rounds):
        for each in contenders:
            cost, ranges = each.measure_ops(batch)
            costs[each.name].append(cost)
            steps[each.name].append(each.measured(ranges))
            for number in numbers:
                seconds[each.name, number].append(each.timed(batch, number))
    known = {name: medians(found, arguments) for name, found in costs.items()}
    median = {key: statistics.median(values) for key, values in seconds.items()}
    rows: list[list[str]] = []
    for each in contenders:
        rows.append([each.name])
        for number in numbers:
            measured = median[each.name, number]
            predicted = each.predicted(known[each.name], number).makespan / number
            ratios = measured / median["1f1b", number], measured / predicted
            rows[-1] += [f"{1e3 * measured:.1f}", *(f"{ratio:.3f}" for ratio in ratios)]
        if arguments.draw is not None and dist.get_rank() == 0:
            fastest = min(steps[each.name], key=lambda timeline: timeline.makespan)
            timelines = {"measured": fastest, "planned": each.predicted(known[each.name], 1)}
            title = f"{each.name} on {arguments.ranks} ranks, {arguments.microbatches} micro-batches"
            draw_timelines(timelines, arguments.draw / f"pipeline-{each.name}.svg", title=title)
    ratios = ["of 1f1b", "measured / predicted"]
    heads = ["schedule", "one step, ms", *ratios, f"{arguments.steps} steps in a row, ms each", *ratios]
    return f"{arguments.ranks} ranks, {arguments.microbatches} micro-batches\n\n{markdown(heads, rows)}"


if __name__ == "__main__":
    main()
