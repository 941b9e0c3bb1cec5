"""Searches the ways to train on some ranks for the fastest: for ``lightning-muon plan --ranks`` and ``--splits``."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from operator import attrgetter
from typing import Any

from lightning_muon.cli import split_rules as rules
from lightning_muon.cli.plan_memory import Memory, memory_of_stages, memory_without_pipeline
from lightning_muon.cli.split_rules import Job, OptimizerStep, Split, SplitTraffic, TrainingMode
from lightning_muon.pipeline.options import PipelineOptions
from lightning_muon.schedule.graph import Graph, build_graph
from lightning_muon.schedule.pipeline import (
    Order,
    Pipeline,
    PipelineKind,
    add_reduce_grad,
    add_unshard,
    build_program,
    make_order,
    placement,
)
from lightning_muon.schedule.program import COMPUTE, Program
from lightning_muon.schedule.simulate import Timeline, simulate

GIB, _MIB = 2**30, 2**20
_UNITS = (("GiB", GIB), ("MiB", _MIB), ("KiB", 2**10))
ACTIVATIONS = {"auto": (False, True), "kept": (False,), "checkpointed": (True,)}
# Factor on the default number of micro-batches, and limit of ranks times micro-batches that are simulated.
_MORE, _MOST_NODES = 4, 2048


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train with a split. Memory is that of the rank that needs most."""

    split: Split
    microbatches: int  # Without a pipeline, the passes of an accumulated batch.
    recompute: bool  # Whether activations are checkpointed.
    memory: Memory
    schedule: Schedule | None = None  # Schedule of a pipeline.
    stays_whole: bool = (
        False  # Without a pipeline: weights stay gathered from the first forward to the end of backward.
    )

    @property
    def total(self) -> int:
        """Peak bytes."""
        return self.memory.peak

    @property
    def name(self) -> str:
        """Name in the table."""
        if self.schedule is not None:
            return f"{self.schedule.name}, m={self.microbatches}{', recompute' * self.recompute}"
        name = self.split.mode
        passes = f", {self.microbatches} passes" * (self.microbatches > 1)
        return f"{name}{', kept whole' * self.stays_whole}{', recompute' * self.recompute}{passes}"


@dataclass(frozen=True, kw_only=True)
class PlannedSplit:
    """The fastest way that fits, or else the one that needs the least memory."""

    way: Way
    fits: bool
    step_seconds: float
    optimizer_seconds: float
    idle: float
    inside_bytes: float
    between_bytes: float

    def to_dict(self) -> dict[str, Any]:
        """The split as a dict for JSON."""
        split, way = self.way.split, self.way
        numbers = {key: value for key, value in vars(self).items() if key != "way"}
        return {
            "pipeline_size": split.pipeline,
            "replicate_size": split.replicate,
            "shard_size": split.shard,
            "schedule": way.schedule and way.schedule.name,
            "microbatches": way.microbatches,
            "activation_checkpointing": way.recompute,
            "weights_stay_whole": way.stays_whole or split.pipeline > 1,
            **numbers,
            "mode": split.mode,
            "memory_bytes": way.memory.to_dict(),
            "peak_bytes": way.total,
        }


@dataclass(frozen=True, eq=False)
class Schedule:
    """A schedule of a model's stages; it does not depend on how the data ranks are divided."""

    name: str
    pipeline: Pipeline
    stages: list[list[int]]  # Parts of each stage.
    order: Order

    @cached_property
    def program(self) -> Program:
        """The program of the schedule."""
        return add_reduce_grad(add_unshard(build_program(self.order, self.pipeline)))

    @cached_property
    def graph(self) -> Graph:
        """Dependency graph of the program."""
        return build_graph(self.program)

    @cached_property
    def num_sent(self) -> list[int]:
        """Number of messages that each rank sends."""
        kinds = (PipelineKind.ACTIVATION, PipelineKind.GRADIENT)
        return [sum(op.kind in kinds and op.group[0] == rank for op in ops) for rank, ops in self.program.items()]

    @cached_property
    def splits_backward(self) -> bool:
        """Whether any backward is split into ``I`` and ``W``."""
        return any(node.kind == PipelineKind.BACKWARD_INPUT for nodes in self.order for node in nodes)

    @cached_property
    def parts_of_ranks(self) -> list[tuple[int, ...]]:
        """Parts of all stages of each rank."""
        rank_of = placement(self.order)
        return [
            tuple(part for stage, parts in enumerate(self.stages) if rank_of[stage] == rank for part in parts)
            for rank in range(len(self.order))
        ]


def find_splits(
    arguments: Namespace,
    job: Job,
    modes: Sequence[TrainingMode],
    *,
    every_split: bool = False,
    left_out: Sequence[str] = (),
) -> tuple[list[PlannedSplit], list[str]]:
    """For each mode, find the fastest split that fits, or else the one that needs least memory, or all splits.

    Splits that fit come first, the fastest at the top. Returns also lines on what was left out, and why, those of the
    caller first.

    Raises:
        ValueError: If there is no split at all.
    """
    search, missing, advice = _Search(arguments, job), list[str](), dict[str, None]()
    found: list[PlannedSplit] = []
    for mode in modes:
        splits = list(splits_of(mode, job, most_stages=len(job.parts)))
        if every_split and mode == "hsdp" and job.num_ranks > 1:  # Replicas of one shard each are HSDP, too.
            splits.append(Split(pipeline=1, replicate=job.num_ranks, shard=1, node_ranks=job.node_ranks))
        of_mode = list(filter(None, map(search.planned, splits)))
        if every_split:
            found += of_mode
        elif of_mode:
            found.append(min(of_mode, key=lambda each: rank_of_row(each) if each.fits else (True, each.way.total)))
        if not of_mode:
            why, helps = f"{job.num_ranks} ranks cannot be divided so", "another number of ranks"
            if splits and all(split.data > job.rows for split in splits):
                why, helps = f"{job.rows} rows are too few for the data ranks of {job.num_ranks}", "a larger --rows"
            elif splits:
                why, helps = "no schedule takes these sizes", "other --schedules, --microbatches or --rows"
            elif mode == "pipeline":
                why += f", into at most {len(job.parts)} stages"
            missing.append(f"{mode} is left out: {why}")
            advice[helps] = None
    lines = [*left_out, *search.left_out, *missing]
    if not found:
        raise ValueError(f"{'; '.join(lines)}. Take {', or '.join(advice)}")
    return sorted(found, key=rank_of_row), lines


def rank_of_row(planned: PlannedSplit) -> tuple[bool, float]:
    """Sort key: splits that fit first, then the fastest."""
    return not planned.fits, planned.step_seconds


def splits_of(mode: TrainingMode, job: Job, *, most_stages: int) -> Iterator[Split]:
    """Yield all splits of the ranks that belong to a mode; ``"none"`` uses one rank."""
    sharding = "fsdp" if mode in ("fsdp", "hsdp", "pipeline") else mode
    num_ranks = 1 if mode == "none" else job.num_ranks
    for pipeline in (each for each in _divisors(num_ranks) if each <= most_stages):
        for shard in _divisors(num_ranks // pipeline):
            replicate = num_ranks // pipeline // shard
            is_of_mode = {
                "none": True,
                "ddp": shard == 1 < replicate,
                "zero2": shard > 1,
                "fsdp": replicate == 1 < shard,
                "hsdp": replicate > 1 and shard > 1,
                "flexdemo": replicate > 1,
                "pipeline": True,
            }
            if is_of_mode[mode] and (pipeline > 1) == (mode == "pipeline"):
                yield Split(
                    pipeline=pipeline, replicate=replicate, shard=shard, node_ranks=job.node_ranks, sharding=sharding
                )


def unit_of(num_bytes: float) -> tuple[str, int]:
    """The unit in which to show sizes up to this one, and its bytes."""
    return ("GiB", GIB) if num_bytes >= GIB else ("MiB", _MIB)


def size_text(num_bytes: float) -> str:
    """A size in the largest unit of which it is a tenth or more."""
    unit, size = next((each for each in _UNITS if num_bytes >= each[1] / 10), ("bytes", 1))
    if size == 1:
        return f"{num_bytes:.0f} bytes"
    return f"{num_bytes / size:{',.1f' if num_bytes >= size else '.2f'}} {unit}"


def pipeline_timeline(job: Job, way: Way) -> Timeline:
    """The simulated forwards, backwards and messages of a pipeline's batch, by rank of the pipeline."""
    schedule = way.schedule
    assert schedule is not None
    options = {"number": way.microbatches, "recompute": way.recompute, "splits_backward": schedule.splits_backward}
    return simulate(schedule.program, rules.stage_costs(job, way.split, schedule.stages, **options), schedule.graph)


class _Search:
    """Finds the ways to train with a split, and the fastest of them; common results are computed once."""

    def __init__(self, arguments: Namespace, job: Job) -> None:
        self._job, self._asked, self._memory = job, arguments, arguments.rank_memory * GIB
        self._num_short = 0  # Splits for which the rows are too few.
        self._recompute = ACTIVATIONS[arguments.activations]
        self._refused: dict[tuple[str, int], ValueError] = {}  # Schedules, by ranks of the pipeline.
        self._schedule, self._optimizer = cache(self._make_schedule), cache(self._simulate_optimizer)
        self._equal_steps: dict[object, OptimizerStep] = {}
        # Shapes of the matrices of each part: equal parts have equal steps. Vectors take almost no time.
        shapes = [
            Counter(replace(p, name="", reason="") for p in some if len(p.shape) > 1) for some in job.parts.parameters
        ]
        self._kinds = [shapes.index(each) for each in shapes]

    def planned(self, split: Split) -> PlannedSplit | None:
        """The fastest way that fits, or else the one that needs least memory; ``None`` if there is no way."""
        if split.data > self._job.rows:
            self._num_short += 1
            return None
        if not (ways := list(self._ways(split))):
            return None
        fitting = [each for each in ways if each.total <= self._memory]
        chosen = fitting or [min(ways, key=lambda each: each.total)]
        return replace(self._fastest(chosen), fits=bool(fitting))

    @property
    def left_out(self) -> Iterator[str]:
        """Lines on splits and schedules that do not take these sizes."""
        if self._num_short:
            rows, splits = self._job.rows, "1 split is" if self._num_short == 1 else f"{self._num_short} splits are"
            yield f"{splits} left out: {rows} rows are too few for their data ranks"
        for name in self._asked.schedules:
            if refused := [size for other, size in self._refused if other == name]:
                why = self._refused[name, refused[0]]
                yield f"{name} is left out in pipelines of {', '.join(map(str, refused))}: {why}"

    def _ways(self, split: Split) -> Iterator[Way]:
        """Yield all ways of a split; without a pipeline, passes are doubled until it fits."""
        job, rows = self._job, rules.rows_of(self._job, split)
        if split.pipeline > 1:
            yield from self._pipelines(split)
            return
        step = self._optimizer(tuple(range(len(job.parts))), split)
        for recompute, stays_whole in product(self._recompute, (False, True) if split.is_fsdp else (False,)):
            options: Any = {"recompute": recompute, "stays_whole": stays_whole}
            passes = 1
            while True:
                found = memory_without_pipeline(job, split, step, passes=passes, **options)
                yield Way(split=split, microbatches=passes, memory=found, **options)
                if found.peak <= self._memory or passes == rows:
                    break
                passes = min(2 * passes, rows)

    def _pipelines(self, split: Split) -> Iterator[Way]:
        numbers = self._numbers_of_microbatches(split)
        for name, number, recompute in product(self._asked.schedules, numbers, self._recompute):
            try:
                schedule = self._schedule(split.pipeline, number, name)
            except ValueError as error:
                self._refused.setdefault((name, split.pipeline), error)
                continue
            steps = [self._optimizer(own, split) for own in schedule.parts_of_ranks]
            memories = [
                memory_of_stages(self._job, split, nodes, schedule.stages, step, number=number, recompute=recompute)
                for nodes, step in zip(schedule.order, steps, strict=True)
            ]
            most = max(memories, key=attrgetter("peak"))
            yield Way(split=split, microbatches=number, recompute=recompute, memory=most, schedule=schedule)

    def _numbers_of_microbatches(self, split: Split) -> list[int]:
        """Numbers of micro-batches: the user's, or the runtime's default and a larger one that idles less.

        If a batch has fewer rows, each row is one micro-batch.
        """
        rows, size = rules.rows_of(self._job, split), split.pipeline
        if self._asked.microbatches:
            return [min(self._asked.microbatches, rows)]
        first = min(PipelineOptions().num_microbatches(size), rows)
        return sorted({first, max(first, min(_MORE * first, rows, _MOST_NODES // size))})

    def _make_schedule(self, num_ranks: int, number: int, name: str) -> Schedule:
        """Make a schedule as the runtime does, without costs."""
        pipeline = PipelineOptions(pipeline_schedule=name).sizes(num_ranks, number)
        return Schedule(name, pipeline, self._job.parts.stages(pipeline.num_stages), make_order(name, pipeline))

    def _fastest(self, ways: Sequence[Way]) -> PlannedSplit:
        """The fastest way of a split. The optimizer is simulated only if the rest is faster than the best so far."""
        timed = [(way, *(self._time_pipeline(way) if way.schedule else self._time_alone(way))) for way in ways]
        best: PlannedSplit | None = None
        for way, idle, ranks in sorted(timed, key=lambda each: max(seconds for seconds, _, _ in each[2])):
            if best is not None and max(seconds for seconds, _, _ in ranks) >= best.step_seconds:
                break
            steps = [self._optimizer(own, way.split).traffic for _, own, _ in ranks]
            ends = [seconds + step.seconds for (seconds, _, _), step in zip(ranks, steps, strict=True)]
            if best is None or max(ends) < best.step_seconds:
                moved = [traffic.plus(step) for (_, _, traffic), step in zip(ranks, steps, strict=True)]
                best = PlannedSplit(
                    way=way,
                    fits=True,
                    step_seconds=max(ends),
                    optimizer_seconds=max(step.seconds for step in steps),
                    idle=idle,
                    inside_bytes=max(each.inside for each in moved),
                    between_bytes=max(each.between for each in moved),
                )
        assert best is not None, "there is a way"
        return best

    def _time_alone(self, way: Way) -> tuple[float, _Ranks]:
        options = {"passes": way.microbatches, "recompute": way.recompute, "stays_whole": way.stays_whole}
        seconds, traffic = rules.seconds_without_pipeline(self._job, way.split, **options)
        return 0.0, [(seconds, tuple(range(len(self._job.parts))), traffic)]

    def _time_pipeline(self, way: Way) -> tuple[float, _Ranks]:
        """Simulate the schedule: its idle share, and for each rank its end, its parts and its traffic."""
        job, split, schedule = self._job, way.split, way.schedule
        assert schedule is not None
        spans = pipeline_timeline(job, way).spans
        one = rules.message(job, rules.rows_of(job, split) / way.microbatches)
        ranks: _Ranks = []
        for rank, own in enumerate(schedule.parts_of_ranks):
            messages = SplitTraffic(*(schedule.num_sent[rank] * each for each in one))
            traffic = messages.plus(rules.gather_weights(job, own, split), rules.reduce(job, own, split))
            ranks.append((spans[rank][-1].end, own, traffic))
        busy = sum(span.end - span.start for each in spans.values() for span in each if span.op.lane == COMPUTE)
        return 1 - busy / (len(ranks) * max(end for end, _, _ in ranks)), ranks

    def _simulate_optimizer(self, own: tuple[int, ...], split: Split) -> OptimizerStep:
        """The optimizer step for the parts of a rank."""
        key = split.sharding, split.replicate, split.shard, split.axes, tuple(sorted(self._kinds[part] for part in own))
        if key not in self._equal_steps:
            parameters = [each for part in own for each in self._job.parts.parameters[part]]
            self._equal_steps[key] = rules.optimizer_step(self._job, parameters, split)
        return self._equal_steps[key]


# For each rank of a pipeline, or for one of equal ranks: time until its gradients are summed, parts, traffic.
_Ranks = list[tuple[float, tuple[int, ...], SplitTraffic]]


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
