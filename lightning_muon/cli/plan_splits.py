"""``lightning-muon plan --splits``: ranks divided over pipeline, replicas and shards in every way, and the fastest.

All numbers are sums and products of sizes, but for two: the schedule of a pipeline and the step of ParallelMuon, which
are simulated. docs/planning.md says by which rules.
"""

from __future__ import annotations

import json
import math
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import Any, NamedTuple

from rich.console import Console
from torch import nn

from lightning_muon.cli.plan_model import Mesh, PlannedModel, count, positive, table
from lightning_muon.cli.plan_parts import PlannedParts
from lightning_muon.cli.plan_strategies import GRID, PIPELINE, Setting, compare_strategies
from lightning_muon.engine.model_setup import SUPPORTED, mixed_precision_policy
from lightning_muon.pipeline.options import PipelineOptions
from lightning_muon.schedule.cost import CostModel
from lightning_muon.schedule.muon import ADAMW_TENSORS, STATE_ITEMSIZE
from lightning_muon.schedule.pipeline import (
    SCHEDULES,
    Order,
    Pipeline,
    PipelineKind,
    StageCosts,
    add_reduce_grad,
    add_unshard,
    build_program,
    make_order,
    peak_activations,
    placement,
)
from lightning_muon.schedule.program import TRANSFER, Op, Program
from lightning_muon.schedule.shapes import ParameterShape
from lightning_muon.schedule.simulate import simulate

_GIB = 2**30
_SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_v")
_ACTIVATIONS = {"auto": (False, True), "kept": (False,), "checkpointed": (True,)}
# Times the default of micro-batches, as far as ranks times micro-batches are not too many to simulate.
_MORE, _MOST_NODES = 4, 2048
_OTHERS = ("pipeline", "draw", "flexdemo", "calibrate", "replicate_size", "shard_size")
_LEGEND = (
    "* is the fastest that fits, - does not fit. m: micro-batches; idle: of all ranks, without the optimizer step; "
    "muon: the optimizer step of the slowest stage; GiB, and MB that a rank sends within its node and to other ones: "
    "of the stage with most"
)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--splits", metavar="RANKS", type=count, help="compare pipeline x replicate x shard splits of so many ranks")
    add("--rows", metavar="N", type=count, help="of a batch of all ranks, for --splits (2 per rank)")
    add("--length", metavar="N", type=count, default=4096, help="tokens of a row, for --splits (4096)")
    add("--rank-memory", metavar="GIB", type=positive, default=72.0, help="that --splits may fill (72)")
    add(
        "--width",
        metavar="N",
        type=count,
        help="elements of a token between two layers, for --splits (the embedding's)",
    )
    add("--schedules", nargs="+", choices=sorted(SCHEDULES), default=_SCHEDULES, help="that --splits tries")
    add("--activations", choices=sorted(_ACTIVATIONS), default="auto", help="for --splits: kept, or recomputed")
    add("--precision", choices=SUPPORTED, help="for --splits (that of the config, or bf16-mixed)")


class Moved(NamedTuple):
    """Seconds of transfers, and what a rank sends in them."""

    seconds: float = 0.0
    inside: float = 0.0  # Bytes within the node.
    between: float = 0.0  # Bytes to other nodes.

    def plus(self, *others: Moved) -> Moved:
        """One after the other."""
        return Moved(*map(sum, zip(self, *others, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Split:
    """Ranks by (pipeline, replicate, shard), the last fastest, as the runtime numbers them."""

    pipeline: int
    replicate: int
    shard: int
    node_ranks: int

    @property
    def data(self) -> int:
        """Ranks with different rows."""
        return self.replicate * self.shard

    def nodes_of(self, stride: int, size: int) -> int:
        """On how many nodes a group of so many ranks, each so far from the next, lies at most."""
        starts = (first + at for first in range(0, self.data * self.pipeline, stride * size) for at in range(stride))
        return max(len({(at + stride * i) // self.node_ranks for i in range(size)}) for at in starts)

    @property
    def axes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Ranks and nodes of a shard group, and of a replicate group."""
        return (
            (self.shard, self.nodes_of(1, self.shard)),
            (self.replicate, self.nodes_of(self.shard, self.replicate)),
        )


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train with a split, not timed yet. Memory is in bytes, of the rank that needs most."""

    split: Split
    name: str
    microbatches: int  # Without a pipeline the passes of an accumulated batch.
    recompute: bool  # Activation checkpointing.
    memory: dict[str, int]
    schedule: str = ""  # Of a pipeline.
    whole: bool = False  # Without a pipeline: weights stay gathered from the first forward to the end of backward.

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.memory.values())


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
        """For JSON."""
        split, way = self.way.split, self.way
        numbers = {key: value for key, value in vars(self).items() if key != "way"}
        return {
            "pipeline_size": split.pipeline,
            "replicate_size": split.replicate,
            "shard_size": split.shard,
            "schedule": way.schedule or None,
            "microbatches": way.microbatches,
            "activation_checkpointing": way.recompute,
            "weights_stay_whole": way.whole or split.pipeline > 1,
            **numbers,
            "memory_bytes": way.memory,
        }


def run(arguments: Namespace, console: Console, setting: Setting, planned: PlannedModel) -> None:
    """Plan all splits and print a table or JSON."""
    planner = SplitPlanner(arguments, setting, planned)
    found = planner.plan()
    fitting = [each for each in found if each.fits]
    best = fitting[0] if fitting else None
    if arguments.json:
        splits = [{**each.to_dict(), "recommended": each is best} for each in found]
        options = {"rows": planner.rows, "length": planner.length, "precision": planner.precision}
        options |= {"rank_memory_gib": arguments.rank_memory, "node_ranks": planner.node_ranks}
        content = {"ranks": arguments.splits, **options, "cost": asdict(setting.cost), "splits": splits}
        sys.stdout.write(json.dumps(content) + "\n")
        return
    links = ", ".join(f"{each / 1e9:g}" for each in setting.cost.bandwidth)
    console.print(
        f"{setting.model.name} on {arguments.splits} ranks, {planner.node_ranks} per node; {planner.rows} rows of "
        f"{planner.length} tokens, {planner.precision}",
        f"machine {setting.machine}: {setting.cost.flops_per_second / 1e12:g} TFLOP/s, links {links} GB/s, "
        f"{arguments.rank_memory:g} GiB per rank",
        _table(found, best),
        _LEGEND,
        *planner.left_out,
        "" if best is None else _recommendation(best),
        sep="\n",
    )
    if best is None:
        least = min(found, key=lambda each: each.way.total).way
        raise ValueError(
            f"no split fits into {arguments.rank_memory:g} GiB per rank; the smallest, {_sizes(least.split)}, needs "
            f"{least.total / _GIB:.1f} GiB. Take more ranks, fewer or shorter rows, or a larger --rank-memory"
        )


def refuse_others(arguments: Namespace) -> None:
    """Raise ``ValueError`` for options that ``--splits`` would ignore."""
    for key in _OTHERS if arguments.splits is not None else ():
        if getattr(arguments, key) not in (None, False, []):
            raise ValueError(f"--splits goes without --{key.replace('_', '-')}")


def _sizes(split: Split) -> str:
    return f"{split.pipeline} x {split.replicate} x {split.shard}"


def _table(found: Sequence[PlannedSplit], best: PlannedSplit | None) -> Any:
    columns = {"pipeline": "d", "replicate": "d", "shard": "d", "": "", "way": "", "step s": ",.2f", "idle": ".1%"}
    columns |= {"muon s": ".3f", "GiB": ",.1f", "MB within": ",.0f", "MB between": ",.0f"}
    rows = [
        (
            *(each.way.split.pipeline, each.way.split.replicate, each.way.split.shard),
            "*" if each is best else "" if each.fits else "-",
            each.way.name,
            each.step_seconds,
            each.idle if each.way.schedule else None,
            each.optimizer_seconds,
            each.way.total / _GIB,
            each.inside_bytes / 1e6,
            each.between_bytes / 1e6,
        )
        for each in found
    ]
    return table(columns, rows)


def _recommendation(best: PlannedSplit) -> str:
    way, split = best.way, best.way.split
    words = {"pipeline_size": split.pipeline, "replicate_size": split.replicate, "shard_size": split.shard}
    if way.schedule:
        words |= {"pipeline_schedule": way.schedule, "pipeline_microbatches": way.microbatches}
    elif way.whole:
        words["reshard_after_forward"] = False
    notes = "" if not way.recompute else ", with activation checkpointing"
    if not way.schedule and way.microbatches > 1:
        notes += f", accumulating {way.microbatches} batches"
    memory = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in way.memory.items())
    return f"recommended: {', '.join(f'{key}={value}' for key, value in words.items())}{notes}; GiB: {memory}"


class SplitPlanner:
    """Memory, time and bytes of every split of some ranks."""

    def __init__(self, arguments: Namespace, setting: Setting, planned: PlannedModel) -> None:
        self._setting, self._cost = setting, setting.cost
        self._num_ranks, self._memory = arguments.splits, arguments.rank_memory * _GIB
        self.node_ranks = arguments.node_ranks or 8
        self.rows, self.length = arguments.rows or 2 * arguments.splits, arguments.length
        self.precision = arguments.precision or planned.precision or "bf16-mixed"
        if self.precision not in SUPPORTED:
            raise ValueError(f"--precision: {self.precision!r} of the config is none of {', '.join(SUPPORTED)}")
        policy = mixed_precision_policy(self.precision, planned.module or nn.Module())
        # Bytes of an element: of weights, gradients and optimizer state; gathered; and of gradients that are summed.
        self._itemsize = 2 if self.precision == "bf16-true" else 4
        self._gathered = policy.param_dtype.itemsize if policy.param_dtype else self._itemsize
        self._reduced = policy.reduce_dtype.itemsize if policy.reduce_dtype else self._gathered
        self._parts = PlannedParts(planned, setting.model, width=arguments.width, itemsize=self._gathered)
        self._schedules, self._microbatches = arguments.schedules, arguments.microbatches
        self._recompute = _ACTIVATIONS[arguments.activations]
        self._refused: dict[tuple[str, int], ValueError] = {}  # Schedules, by ranks of the pipeline.
        self.left_out: list[str] = []  # What was not planned, and why.
        self._scheduled = cache(self._make_schedule)
        self._steps: dict[object, Moved] = {}

    def plan(self) -> list[PlannedSplit]:
        """All splits, the fastest that fits first."""
        found: list[PlannedSplit] = []
        num_short = 0
        sizes = [each for each in _divisors(self._num_ranks) if each <= len(self._parts)]
        for pipeline in sizes:
            for shard in _divisors(self._num_ranks // pipeline):
                replicate = self._num_ranks // pipeline // shard
                split = Split(pipeline=pipeline, replicate=replicate, shard=shard, node_ranks=self.node_ranks)
                num_short += split.data > self.rows
                ways = [] if split.data > self.rows else list(self._ways(split))
                if fitting := [each for each in ways if each.total <= self._memory]:
                    found.append(min(map(self._timed, fitting), key=lambda each: each.step_seconds))
                elif ways:
                    found.append(self._timed(min(ways, key=lambda each: each.total)))
        if num_short:
            self.left_out.append(f"{num_short} splits are left out: {self.rows} rows are too few for their data ranks")
        for name in self._schedules:
            if refused := [size for other, size in self._refused if other == name]:
                why = self._refused[name, refused[0]]
                self.left_out.append(f"{name} is left out in pipelines of {', '.join(map(str, refused))}: {why}")
        if not found:
            raise ValueError(f"{self._num_ranks} ranks cannot be split; {'; '.join(self.left_out)}; raise --rows")
        return sorted(found, key=lambda each: (not each.fits, each.step_seconds))

    def _ways(self, split: Split) -> Iterator[Way]:
        return self._without_pipeline(split) if split.pipeline == 1 else self._with_pipeline(split)

    def _timed(self, way: Way) -> PlannedSplit:
        return self._time_alone(way) if way.split.pipeline == 1 else self._time_pipeline(way)

    def _rows_of(self, split: Split) -> int:
        """Of a data rank, of the one with most."""
        return -(-self.rows // split.data)

    def _state(self, parts: Iterable[int], split: Split) -> tuple[int, int, int]:
        """Elements that a rank holds: of weights, of those that are trained, and of optimizer state."""
        weights = trained = state = 0
        for each in (each for part in parts for each in self._parts.parameters[part]):
            held = _largest_shard(each, split.shard)
            weights += held
            if not each.frozen:
                trained += held
                state += held * (1 if each.algorithm == "muon" else 2)
        return weights, trained, state

    # ---- without a pipeline

    def _without_pipeline(self, split: Split) -> Iterator[Way]:
        parts, everything = self._parts, range(len(self._parts))
        weights, trained, state = self._state(everything, split)
        rows = self._rows_of(split)
        for recompute, whole in product(self._recompute, (False, True)):
            kept = sum(parts.kept(part, recompute=recompute) for part in everything)
            kept += parts.recomputed(everything) if recompute else 0
            passes = 1
            while True:
                numel = trained + max(parts.numel) if passes == 1 else sum(parts.numel)
                memory = {
                    "weights": self._itemsize * weights,
                    "gradients": self._reduced * numel,
                    "optimizer": self._itemsize * state,
                    "activations": -(-rows // passes) * self.length * kept,
                    "gathered": self._gathered * (sum(parts.numel) if whole else sum(sorted(parts.numel)[-2:])),
                }
                name = "hsdp" if split.replicate > 1 else "fsdp"
                name += ", kept whole" * whole + ", recompute" * recompute + f", {passes} passes" * (passes > 1)
                way = Way(split=split, name=name, microbatches=passes, recompute=recompute, whole=whole, memory=memory)
                yield way
                if way.total <= self._memory or passes == rows:
                    break
                passes = min(2 * passes, rows)

    def _time_alone(self, way: Way) -> PlannedSplit:
        """Forward, backward and step: transfers of a pass run behind its compute, but for the first and the last."""
        split, everything = way.split, range(len(self._parts))
        gather, reduce = self._gather(everything, split), self._reduce(everything, split)
        forward, backward = self._compute(everything, self._rows_of(split) / way.microbatches, way.recompute)
        again = 0.0 if way.whole else gather.seconds  # Of every forward but the first, and of every backward.
        seconds = max(forward, gather.seconds) + (way.microbatches - 1) * (max(forward, again) + max(backward, again))
        seconds += max(backward, again + reduce.seconds)
        seconds += self._gather([0], split).seconds + self._reduce([0], split).seconds
        number = 1 if way.whole else 2 * way.microbatches
        optimizer = self._optimizer(everything, split)
        moved = reduce.plus(optimizer, *[gather] * number)
        return PlannedSplit(
            way=way,
            fits=way.total <= self._memory,
            step_seconds=seconds + optimizer.seconds,
            optimizer_seconds=optimizer.seconds,
            idle=0.0,
            inside_bytes=moved.inside,
            between_bytes=moved.between,
        )

    def _compute(self, parts: Sequence[int], rows: float, recompute: bool) -> tuple[float, float]:
        """Seconds of forward and of backward, with what it computes again."""
        seconds = rows * self.length / self._cost.flops_per_second
        flops = self._parts.forward_flops
        again = sum(flops[part] for part in parts if self._parts.is_layer[part]) if recompute else 0
        forward = sum(flops[part] for part in parts)
        return seconds * forward, seconds * (2 * forward + again)

    # ---- transfers

    def _ring(self, axis: tuple[int, int], num_bytes: float, num_calls: int) -> Moved:
        """All-gathers or reduce-scatters of so many bytes, each in a ring that enters every node once."""
        size, nodes = axis
        sent = num_bytes * (size - 1) / size
        between = sent * nodes / size if nodes > 1 else 0.0
        return Moved(
            num_calls * self._transfer((sent - between) / num_calls, between / num_calls), sent - between, between
        )

    def _transfer(self, inside: float, between: float) -> float:
        sizes = (round(inside), round(between))
        if not any(sizes):
            return 0.0
        op = Op(kind="transfer", key="", rank=0, lane=TRANSFER, bytes=sum(sizes), axis_bytes=sizes, group=(0, 1))
        return self._cost.seconds(op)

    def _gather(self, parts: Sequence[int], split: Split) -> Moved:
        """Of the weights of some parts, each by itself."""
        numel = sum(self._parts.numel[part] for part in parts)
        return self._ring(split.axes[0], self._gathered * numel, len(parts))

    def _reduce(self, parts: Sequence[int], split: Split) -> Moved:
        """Of their gradients: over the shards, and what is left over the replicas."""
        num_bytes = self._reduced * sum(self._parts.numel[part] for part in parts)
        shards, replicas = split.axes
        sums = self._ring(replicas, num_bytes / split.shard, len(parts))  # An all-reduce is two of them.
        return self._ring(shards, num_bytes, len(parts)).plus(sums, sums)

    def _optimizer(self, parts: Sequence[int], split: Split) -> Moved:
        """The simulated step of ParallelMuon for the parameters of some parts; equal ones are simulated once."""
        parameters = [each for part in parts for each in self._parts.parameters[part]]
        kinds = Counter(replace(each, name="", reason="") for each in parameters)
        key = split.replicate, split.shard, split.axes, frozenset(kinds.items())
        if key not in self._steps:
            self._steps[key] = self._simulate_optimizer(parameters, split)
        return self._steps[key]

    def _simulate_optimizer(self, parameters: Sequence[ParameterShape], split: Split) -> Moved:
        spans = [nodes > 1 for _, nodes in split.axes]
        trained = [each for each in parameters if not each.frozen]
        if all(each.algorithm == "adamw" for each in trained):
            held = sum(_largest_shard(each, split.shard) for each in trained)
            return Moved(ADAMW_TENSORS * STATE_ITEMSIZE * held / self._cost.memory_bytes_per_second)
        setting = replace(
            self._setting,
            model=replace(self._setting.model, parameters=tuple(parameters)),
            mesh=Mesh(split.replicate, split.shard),
            cost=_with_links(self._cost, spans),
        )
        outcomes = compare_strategies(setting, (PIPELINE, GRID))
        best = min(outcomes, key=lambda each: each.timeline.makespan)
        between = {"within a replica": spans[0], "between replicas": spans[1]}
        sent = {False: 0.0, True: 0.0}
        for each in best.numbers["bytes"]:
            sent[between[each["axis"]]] += each["most"]
        return Moved(best.timeline.makespan, sent[False], sent[True])

    # ---- with a pipeline

    def _numbers_of_microbatches(self, split: Split) -> list[int]:
        """What was asked for, or the runtime's default and one that idles less.

        A batch of fewer rows has one micro-batch of each.
        """
        rows, size = self._rows_of(split), split.pipeline
        if self._microbatches:
            return [min(self._microbatches, rows)]
        first = min(PipelineOptions().num_microbatches(size), rows)
        return sorted({first, max(first, min(_MORE * first, rows, _MOST_NODES // size))})

    def _with_pipeline(self, split: Split) -> Iterator[Way]:
        parts, numbers = self._parts, self._numbers_of_microbatches(split)
        for name, number, recompute in product(self._schedules, numbers, self._recompute):
            try:
                schedule = self._scheduled(split.pipeline, number, name)
            except ValueError as error:
                self._refused.setdefault((name, split.pipeline), error)
                continue
            tokens = -(-self._rows_of(split) // number) * self.length
            kept = {
                stage: tokens * sum(parts.kept(part, recompute=recompute) for part in some)
                for stage, some in enumerate(schedule.stages)
            }
            memories: list[dict[str, int]] = []
            for nodes, own in zip(schedule.order, schedule.parts_of_ranks, strict=True):
                weights, _, state = self._state(own, split)
                numel = sum(parts.numel[part] for part in own)
                again = tokens * parts.recomputed(own) if recompute else 0
                memories.append(
                    {
                        "weights": self._itemsize * weights,
                        "gradients": self._reduced * numel,
                        "optimizer": self._itemsize * state,
                        "activations": peak_activations(nodes, kept) + again,
                        "gathered": self._gathered * numel,
                    }
                )
            yield Way(
                split=split,
                name=f"{name}, m={number}{', recompute' * recompute}",
                microbatches=number,
                recompute=recompute,
                schedule=name,
                memory=max(memories, key=lambda memory: sum(memory.values())),
            )

    def _make_schedule(self, num_ranks: int, number: int, name: str) -> _Scheduled:
        """As the runtime makes it, which knows no costs."""
        stages_per_rank = PipelineOptions(pipeline_schedule=name).stages_per_rank
        pipeline = Pipeline(num_ranks=num_ranks, num_microbatches=number, stages_per_rank=stages_per_rank)
        return _Scheduled(pipeline, self._parts.stages(pipeline.num_stages), make_order(name, pipeline))

    def _costs(self, way: Way, schedule: _Scheduled) -> StageCosts:
        rows = self._rows_of(way.split) / way.microbatches
        times = [self._compute(parts, rows, way.recompute) for parts in schedule.stages]
        inputs = tuple(backward - forward for forward, backward in times)
        return StageCosts(
            forward=tuple(forward for forward, _ in times),
            # What is computed again belongs to the first part of a backward; if there are two, to both.
            backward_input=inputs,
            backward_weight=inputs if schedule.splits_backward else tuple(forward for forward, _ in times),
            communication=self._transfer(*self._message(rows * self.length * self._parts.inputs)),
            unshard=tuple(self._gather(parts, way.split).seconds for parts in schedule.stages),
            reduce_grad=tuple(self._reduce(parts, way.split).seconds for parts in schedule.stages),
        )

    def _message(self, num_bytes: float) -> tuple[float, float]:
        """Within a node, or between nodes as soon as there are several."""
        return (0.0, num_bytes) if self._num_ranks > self.node_ranks else (num_bytes, 0.0)

    def _time_pipeline(self, way: Way) -> PlannedSplit:
        """The simulated schedule; each rank steps when the gradients of its stages are summed."""
        split, schedule = way.split, self._scheduled(way.split.pipeline, way.microbatches, way.schedule)
        timeline = simulate(schedule.program, self._costs(way, schedule))
        message = self._message(self._rows_of(split) / way.microbatches * self.length * self._parts.inputs)
        step, optimizers, moved = 0.0, list[float](), list[Moved]()
        for rank, own in enumerate(schedule.parts_of_ranks):
            optimizer = self._optimizer(own, split)
            step = max(step, timeline.spans[rank][-1].end + optimizer.seconds)
            optimizers.append(optimizer.seconds)
            number = schedule.num_sent[rank]
            messages = Moved(0.0, number * message[0], number * message[1])
            moved.append(optimizer.plus(messages, self._gather(own, split), self._reduce(own, split)))
        return PlannedSplit(
            way=way,
            fits=way.total <= self._memory,
            step_seconds=step,
            optimizer_seconds=max(optimizers),
            idle=timeline.idle,
            inside_bytes=max(each.inside for each in moved),
            between_bytes=max(each.between for each in moved),
        )


@dataclass(frozen=True, eq=False)
class _Scheduled:
    """A schedule of a model's stages, the same for all ways to divide the data ranks."""

    pipeline: Pipeline
    stages: list[list[int]]  # Parts of each.
    order: Order

    @cached_property
    def program(self) -> Program:
        """What runs."""
        return add_reduce_grad(add_unshard(build_program(self.order, self.pipeline)))

    @cached_property
    def num_sent(self) -> list[int]:
        """Messages of each rank."""
        kinds = (PipelineKind.ACTIVATION, PipelineKind.GRADIENT)
        return [sum(op.kind in kinds and op.group[0] == rank for op in ops) for rank, ops in self.program.items()]

    @cached_property
    def splits_backward(self) -> bool:
        """Whether any."""
        return any(node.kind == PipelineKind.BACKWARD_INPUT for nodes in self.order for node in nodes)

    @cached_property
    def parts_of_ranks(self) -> list[list[int]]:
        """Of all stages of each rank."""
        rank_of = placement(self.order)
        return [
            [part for stage, parts in enumerate(self.stages) if rank_of[stage] == rank for part in parts]
            for rank in range(len(self.order))
        ]


def _with_links(cost: CostModel, spans: Sequence[bool]) -> CostModel:
    """With the link within a replica and that between replicas, each that between nodes if it leaves one."""
    if len(cost.bandwidth) == 1:
        return cost
    ends = [-1 if leaves else 0 for leaves in spans]
    return replace(
        cost,
        bandwidth=tuple(cost.bandwidth[end] for end in ends),
        latency_seconds=tuple(cost.latency_seconds[end] for end in ends),
    )


def _largest_shard(parameter: ParameterShape, num_shards: int) -> int:
    """Elements on the first rank, which FSDP2 gives most."""
    if not parameter.shape:
        return 1
    size = parameter.shape[parameter.shard_dim]
    return -(-size // num_shards) * (math.prod(parameter.shape) // max(1, size))


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
