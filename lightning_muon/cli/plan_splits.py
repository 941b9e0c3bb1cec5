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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import groupby, product
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import nn

from lightning_muon.cli.plan_model import Mesh, PlannedModel, count, positive, table
from lightning_muon.cli.plan_strategies import GRID, PIPELINE, Setting, compare_strategies
from lightning_muon.engine.model_setup import SUPPORTED, mixed_precision_policy
from lightning_muon.pipeline.cut import choose_stages, matrices_of
from lightning_muon.pipeline.model import Chain, StagedModel, find_staged_model
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
from lightning_muon.schedule.shapes import ModelShapes, ParameterShape
from lightning_muon.schedule.simulate import simulate

_GIB = 2**30
_LOSS_BYTES = 8  # Of each logit: its float32 copy for the loss, and the gradient of that.
_SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_1p", "zb_v")
_ACTIVATIONS = {"auto": (False, True), "kept": (False,), "checkpointed": (True,)}
_OTHERS = ("pipeline", "draw", "flexdemo", "calibrate", "replicate_size", "shard_size")
_LEGEND = (
    "* is the fastest that fits, - does not fit. bubble: idle share of the rank that works longest; muon: the optimizer "
    "step of the slowest stage; GiB, and MB that a rank sends within its node and to other ones: of the stage with most"
)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--splits", metavar="RANKS", type=count, help="compare pipeline x replicate x shard splits of so many ranks")
    add("--rows", metavar="N", type=count, help="of a batch of all ranks, for --splits (2 per rank)")
    add("--length", metavar="N", type=count, default=4096, help="tokens of a row, for --splits (4096)")
    add("--rank-memory", metavar="GIB", type=positive, default=72.0, help="that --splits may fill (72)")
    add("--width", metavar="N", type=count, help="elements of a token between two layers, for --splits (the embedding's)")
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
    bubble: float
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
    """Raise ``ValueError`` for options that would be ignored."""
    for key in _OTHERS:
        if getattr(arguments, key) not in (None, False, []):
            raise ValueError(f"--splits goes without --{key.replace('_', '-')}")


def _sizes(split: Split) -> str:
    return f"{split.pipeline} x {split.replicate} x {split.shard}"


def _table(found: Sequence[PlannedSplit], best: PlannedSplit | None) -> Any:
    columns = {"pipeline": "d", "replicate": "d", "shard": "d", "": "", "way": "", "step s": ",.2f", "bubble": ".1%"}
    columns |= {"muon s": ".3f", "GiB": ",.1f", "MB within": ",.0f", "MB between": ",.0f"}
    rows = [
        (
            *(each.way.split.pipeline, each.way.split.replicate, each.way.split.shard),
            "*" if each is best else "" if each.fits else "-",
            each.way.name,
            each.step_seconds,
            each.bubble if each.way.schedule else None,
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


class PlannedParts:
    """A model as the parts that the runtime makes stages of, and what each of them costs."""

    def __init__(self, planned: PlannedModel, model: ModelShapes, *, width: int | None, itemsize: int) -> None:
        if planned.module is None:
            self._staged, shapes = _from_shapes(model)
        else:
            self._staged = find_staged_model(planned.module)
            shapes = dict(zip(planned.module.parameters(), model.parameters, strict=True))
        parts = self._staged.parts
        distinct = [dict.fromkeys(p for module in part.modules for p in module.parameters()) for part in parts]
        self.parameters = [[shapes[parameter] for parameter in each] for each in distinct]
        self.numel = [sum(math.prod(each.shape) for each in some) for some in self.parameters]
        self.width = width or _width_of(model)
        # Activation checkpointing is for layers: embeddings and the output head are outside of them.
        self.is_layer = [any(each.algorithm == "muon" for each in some) for some in self.parameters]
        matrices = [matrices_of(part) for part in parts]
        self.forward_flops = [2 * sum(each.numel() for each in some) for some in matrices]  # For each token.
        # Bytes for each token that backward needs: what goes into each matrix, and what comes out.
        self.activations = [itemsize * sum(each.shape[-1] + each.shape[-2] for each in some) for some in matrices]
        self.inputs = self.width * itemsize
        if matrices[-1] and not self.is_layer[-1]:
            self.activations[-1] += _LOSS_BYTES * matrices[-1][-1].shape[0]
        self._index = {id(part): index for index, part in enumerate(parts)}
        self.stages = cache(self._stages)

    def _stages(self, num_stages: int) -> list[list[int]]:
        """The parts of each stage, by number."""
        return [[self._index[id(part)] for part in stage] for stage in choose_stages(self._staged, num_stages)]

    def __len__(self) -> int:
        return len(self.parameters)

    def kept(self, part: int, *, recompute: bool) -> int:
        """Bytes for each token of a micro-batch on its way."""
        return self.inputs if recompute and self.is_layer[part] else self.activations[part]

    def recomputed(self, parts: Sequence[int]) -> int:
        """Bytes for each token of the layer that is computed again at a time."""
        return max((self.activations[part] for part in parts if self.is_layer[part]), default=0)


def _from_shapes(model: ModelShapes) -> tuple[StagedModel, dict[nn.Parameter, ParameterShape]]:
    """Modules without memory: one for each numbered layer, and for what stands before, between and behind them."""
    shapes: dict[nn.Parameter, ParameterShape] = {}

    def module_of(each: ParameterShape) -> nn.Module:
        parameter = nn.Parameter(torch.empty(each.shape, device="meta"), requires_grad=False)
        shapes[parameter] = each
        is_table = each.reason.startswith("embedding") and len(each.shape) == 2
        module = nn.Embedding(*each.shape, _weight=parameter) if is_table else nn.Module()
        module.weight = parameter
        return module

    def layer_of(each: ParameterShape) -> str:
        words = each.name.split(".")
        number = next((index for index, word in enumerate(words) if word.isdigit()), None)
        return "" if number is None else ".".join(words[: number + 1])

    parts = [nn.ModuleList(map(module_of, some)) for _, some in groupby(model.parameters, layer_of)]
    if not any(each.reason.startswith("output head") for each in model.parameters):  # It is tied to the embedding.
        tied = [p for p, each in shapes.items() if each.reason.startswith("embedding")][:1]
        parts[-1].extend(_holding(parameter) for parameter in tied)
    root = nn.ModuleList(parts)
    return Chain(root, parts, None, lambda output, _: (output, 1)), shapes


def _holding(parameter: nn.Parameter) -> nn.Module:
    module = nn.Module()
    module.weight = parameter
    return module


def _width_of(model: ModelShapes) -> int:
    tables = (each.shape[-1] for each in model.parameters if each.reason.startswith("embedding"))
    if (width := next(tables, None)) is None:
        raise ValueError(f"{model.name} has no embedding that says how wide its activations are; add --width")
    return width


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
        self.left_out: list[str] = []
        self._orders, self._programs = cache(self._order), cache(self._program)
        self._steps: dict[object, Moved] = {}

    def plan(self) -> list[PlannedSplit]:
        """All splits, the fastest that fits first."""
        found: list[PlannedSplit] = []
        num_short = 0
        for pipeline in _divisors(self._num_ranks):
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
                way = Way(
                    split=split, name=name, microbatches=passes, recompute=recompute, whole=whole, memory=memory
                )
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
            bubble=0.0,
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
        return Moved(num_calls * self._transfer((sent - between) / num_calls, between / num_calls), sent - between, between)

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

    def _num_microbatches(self, split: Split) -> int:
        """As the runtime does it: a batch of fewer rows has one micro-batch of each."""
        asked = PipelineOptions(pipeline_microbatches=self._microbatches or "auto").num_microbatches(split.pipeline)
        return min(asked, self._rows_of(split))

    def _with_pipeline(self, split: Split) -> Iterator[Way]:
        parts, number = self._parts, self._num_microbatches(split)
        tokens = -(-self._rows_of(split) // number) * self.length
        for name, recompute in product(self._schedules, self._recompute):
            try:
                order, stages = self._orders(split.pipeline, number, name, recompute)
            except ValueError as error:
                note = f"{name} is left out with {split.pipeline} ranks and {number} micro-batches: {error}"
                if note not in self.left_out:
                    self.left_out.append(note)
                continue
            kept = {
                stage: tokens * sum(parts.kept(part, recompute=recompute) for part in some)
                for stage, some in enumerate(stages)
            }
            memories: list[dict[str, int]] = []
            for nodes, own in zip(order, _parts_of_ranks(order, stages), strict=True):
                weights, _, state = self._state(own, split)
                numel = sum(parts.numel[part] for part in own)
                activations = peak_activations(nodes, kept) + tokens * recompute * parts.recomputed(own)
                memories.append(
                    {
                        "weights": self._itemsize * weights,
                        "gradients": self._reduced * numel,
                        "optimizer": self._itemsize * state,
                        "activations": activations,
                        "gathered": self._gathered * numel,
                    }
                )
            yield Way(
                split=split,
                name=f"{name}, {number} micro-batches{', recompute' * recompute}",
                microbatches=number,
                recompute=recompute,
                schedule=name,
                memory=max(memories, key=lambda memory: sum(memory.values())),
            )

    def _order(self, num_ranks: int, number: int, name: str, recompute: bool) -> tuple[Order, list[list[int]]]:
        """The schedule, and the parts of each stage."""
        pipeline = self._pipeline(num_ranks, number, name, recompute)
        return make_order(name, pipeline), self._parts.stages(pipeline.num_stages)

    def _program(self, num_ranks: int, number: int, name: str, recompute: bool) -> tuple[Program, StageCosts]:
        """What runs, and its costs but for those of the data ranks."""
        pipeline = self._pipeline(num_ranks, number, name, recompute)
        order, _ = self._orders(num_ranks, number, name, recompute)
        return add_reduce_grad(add_unshard(build_program(order, pipeline))), pipeline.costs

    def _pipeline(self, num_ranks: int, number: int, name: str, recompute: bool) -> Pipeline:
        stages_per_rank = PipelineOptions(pipeline_schedule=name).stages_per_rank
        stages = self._parts.stages(num_ranks * stages_per_rank)
        rows = -(-self.rows // (self._num_ranks // num_ranks)) / number
        times = [self._compute(parts, rows, recompute) for parts in stages]
        message = rows * self.length * self._parts.inputs
        costs = StageCosts(
            forward=tuple(forward for forward, _ in times),
            # What is computed again belongs to the first part; if there are two, to both.
            backward_input=tuple(backward - forward for forward, backward in times),
            backward_weight=tuple(forward for forward, _ in times),
            communication=self._transfer(*self._message(message)),
        )
        pipeline = Pipeline(num_ranks=num_ranks, num_microbatches=number, stages_per_rank=stages_per_rank, costs=costs)
        if recompute and _splits_backward(name, num_ranks, number, stages_per_rank):
            pipeline = replace(pipeline, costs=replace(costs, backward_weight=costs.backward_input))
        return pipeline

    def _message(self, num_bytes: float) -> tuple[float, float]:
        """Within a node, or between nodes as soon as there are several."""
        return (0.0, num_bytes) if self._num_ranks > self.node_ranks else (num_bytes, 0.0)

    def _time_pipeline(self, way: Way) -> PlannedSplit:
        """The simulated schedule; each rank steps when the gradients of its stages are summed."""
        split, (order, stages) = way.split, self._orders(*(key := self._key(way)))
        program, costs = self._programs(*key)
        gathers, sums = ([move(parts, split) for parts in stages] for move in (self._gather, self._reduce))
        costs = replace(
            costs, unshard=tuple(each.seconds for each in gathers), reduce_grad=tuple(each.seconds for each in sums)
        )
        timeline = simulate(program, costs)
        rank_of = placement(order)
        message = self._message(self._rows_of(split) / way.microbatches * self.length * self._parts.inputs)
        step, optimizers, moved = 0.0, list[float](), list[Moved]()
        for rank, own in enumerate(_parts_of_ranks(order, stages)):
            optimizer = self._optimizer(own, split)
            step = max(step, timeline.spans[rank][-1].end + optimizer.seconds)
            optimizers.append(optimizer.seconds)
            kinds = (PipelineKind.ACTIVATION, PipelineKind.GRADIENT)
            number = sum(op.kind in kinds and op.group[0] == rank for op in program[rank])
            mine = [each for stage, each in enumerate(zip(gathers, sums, strict=True)) if rank_of[stage] == rank]
            messages = Moved(0.0, number * message[0], number * message[1])
            moved.append(optimizer.plus(messages, *(each for pair in mine for each in pair)))
        return PlannedSplit(
            way=way,
            fits=way.total <= self._memory,
            step_seconds=step,
            optimizer_seconds=max(optimizers),
            bubble=timeline.bubble,
            inside_bytes=max(each.inside for each in moved),
            between_bytes=max(each.between for each in moved),
        )

    def _key(self, way: Way) -> tuple[int, int, str, bool]:
        return way.split.pipeline, way.microbatches, way.schedule, way.recompute


@cache
def _splits_backward(name: str, num_ranks: int, number: int, stages_per_rank: int) -> bool:
    pipeline = Pipeline(num_ranks=num_ranks, num_microbatches=number, stages_per_rank=stages_per_rank)
    return any(node.kind == PipelineKind.BACKWARD_INPUT for nodes in make_order(name, pipeline) for node in nodes)


def _parts_of_ranks(order: Order, stages: Sequence[Sequence[int]]) -> list[list[int]]:
    rank_of = placement(order)
    return [
        [part for stage, parts in enumerate(stages) if rank_of[stage] == rank for part in parts]
        for rank in range(len(order))
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
