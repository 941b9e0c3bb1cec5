"""The rules of ``lightning-muon plan --ranks`` and ``--splits``: what a rank holds, transfers, and seconds of a step.

Pure functions of sizes and rates; :mod:`lightning_muon.cli.plan_memory` has those of memory. docs/planning.md has them
in words, beside measurements of real runs.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Literal, NamedTuple, get_args

import torch

from lightning_muon.cli.plan_flexdemo import node_traffic, step_seconds
from lightning_muon.cli.plan_model import Mesh
from lightning_muon.cli.plan_parts import PlannedParts
from lightning_muon.cli.plan_strategies import GRID, PIPELINE, Outcome, Setting, compare_strategies
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.replicators import DCTTopK, LocalSteps
from lightning_muon.grad_sync.reducer import BUCKET_BYTES, make_buckets
from lightning_muon.math.newton_schulz import Arithmetic, NewtonSchulzOptions
from lightning_muon.params.logical import logical_matrices
from lightning_muon.schedule.assign import longest_first
from lightning_muon.schedule.cost import CostModel
from lightning_muon.schedule.muon import ADAMW_TENSORS, STATE_ITEMSIZE
from lightning_muon.schedule.pipeline import StageCosts
from lightning_muon.schedule.shapes import ParameterShape

Sharding = Literal["none", "ddp", "zero2", "fsdp", "flexdemo"]
"""``sharding`` of a strategy, or FlexDeMo, which shards with FSDP2 inside of each node."""
TrainingMode = Literal["none", "ddp", "zero2", "fsdp", "hsdp", "pipeline", "flexdemo"]
TRAINING_MODES: tuple[TrainingMode, ...] = get_args(TrainingMode)


# Number of tensors of parameter size that a FlexDeMo reads and writes to encode and decode, counted in
# flexdemo/bucket.py. SGD reads an update, and reads and writes weights.
_CODEC_TENSORS, _SGD_TENSORS = 15, 3


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """A training: model, batch and machine."""

    parts: PlannedParts
    setting: Setting  # Setting of the optimizer step, with the rates.
    num_ranks: int
    node_ranks: int
    rows: int  # Rows of a batch of all ranks together.
    length: int  # Tokens of a row.
    # Bytes of an element of weights, gradients and state; of gathered weights; of gradients that are summed.
    itemsize: int
    gathered_itemsize: int
    reduced_itemsize: int
    flops_per_second: float  # FLOP/s of forward and backward.
    bucket_bytes: int = BUCKET_BYTES  # Bytes of gradients of whole weights that are sent together.
    flexdemo: FlexDeMoConfig = field(default_factory=FlexDeMoConfig)

    @property
    def casts_itemsize(self) -> int:
        """Bytes of an element of the copies that autocast makes of whole weights; 0 if they are used as they are."""
        return self.gathered_itemsize if self.gathered_itemsize < self.itemsize else 0

    @property
    def cost(self) -> CostModel:
        """Rates of the machine."""
        return self.setting.cost


@dataclass(frozen=True, kw_only=True)
class Split:
    """Ranks by (pipeline, replicate, shard), the last fastest, as the runtime numbers them."""

    pipeline: int
    replicate: int
    shard: int
    node_ranks: int
    sharding: Sharding = "fsdp"

    @property
    def mode(self) -> TrainingMode:
        """Name of the mode, as in the table."""
        if self.sharding != "fsdp":
            return self.sharding
        return "pipeline" if self.pipeline > 1 else "hsdp" if self.replicate > 1 else "fsdp"

    @property
    def sizes(self) -> str:
        """The sizes as text for tables."""
        return f"{self.pipeline} x {self.replicate} x {self.shard}"

    @property
    def shards_of_weights(self) -> int:
        """Number of ranks that share the weights."""
        return self.shard if self.is_fsdp else 1

    @property
    def is_fsdp(self) -> bool:
        """Whether FSDP2 shards the weights."""
        return self.sharding in ("fsdp", "flexdemo")

    @property
    def data(self) -> int:
        """Number of ranks with different rows."""
        return self.replicate * self.shard

    @cached_property
    def axes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Ranks of a shard group and most nodes over which it is spread; the same of a replicate group."""
        shards, replicas = self._nodes_of(1, self.shard), self._nodes_of(self.shard, self.replicate)
        return (self.shard, shards), (self.replicate, replicas)

    def _nodes_of(self, stride: int, size: int) -> int:
        """Most nodes over which one group of ``size`` ranks, ``stride`` apart, is spread."""
        firsts = range(0, self.data * self.pipeline, stride * size)
        # Groups that begin at the same place of a node lie alike.
        starts = {(first + at) % self.node_ranks for first in firsts for at in range(stride)}
        return max(len({(at + stride * i) // self.node_ranks for i in range(size)}) for at in starts)


class SplitTraffic(NamedTuple):
    """Seconds of transfers, and the bytes that a rank sends in them."""

    seconds: float = 0.0
    inside: float = 0.0  # Bytes within the node.
    between: float = 0.0  # Bytes to other nodes.

    def plus(self, *others: SplitTraffic) -> SplitTraffic:
        """The sum of transfers that run one after the other."""
        return SplitTraffic(*map(sum, zip(self, *others, strict=True)))


# ---- what a rank holds


def held(parameter: ParameterShape, num_shards: int) -> int:
    """Number of elements on the first rank, which gets most from FSDP2."""
    if not parameter.shape:
        return 1
    size = parameter.shape[parameter.shard_dim]
    return -(-size // num_shards) * (math.prod(parameter.shape) // max(1, size))


@cache
def held_by_parts(job: Job, num_shards: int) -> tuple[list[int], list[int]]:
    """Number of elements of each part on the first rank, and of those that are trained."""
    every = [sum(held(each, num_shards) for each in some) for some in job.parts.parameters]
    trained = [sum(held(each, num_shards) for each in some if not each.frozen) for some in job.parts.parameters]
    return every, trained


@cache
def zero2_owners(job: Job, split: Split) -> dict[str, int]:
    """Name of each matrix that is whole on one rank of the shard axis with ZeRO-2 -> that rank, as in a run."""
    trained = [each for some in job.parts.parameters for each in some if not each.frozen]
    whole = [each for each in trained if each.kind in ("matrix", "convolution")]
    options = NewtonSchulzOptions.of(vars(job.setting.config))
    arithmetic = Arithmetic("cpu" if job.setting.is_cpu else "cuda", torch.bfloat16)
    costs = [
        sum(options.flops(one.rows, one.cols, arithmetic) for one in logical_matrices(each.shape, each))
        for each in whole
    ]
    sizes = [job.itemsize * math.prod(each.shape) for each in whole]
    owners = longest_first(costs, sizes, [(0, 0)] * split.shard, taken=range(len(whole)))
    return {whole[index].name: rank for index, rank in owners.items()}


@cache
def zero2_elements(job: Job, split: Split) -> tuple[int, int]:
    """Number of trained elements on the rank with most, with ZeRO-2, and of those in matrices."""
    owners, owned, rows, of_stacks = zero2_owners(job, split), Counter[int](), 0, 0
    for each in (each for some in job.parts.parameters for each in some if not each.frozen):
        if each.name in owners:
            owned[owners[each.name]] += math.prod(each.shape)
        else:
            rows += held(each, split.shard)
            of_stacks += held(each, split.shard) if each.algorithm == "muon" else 0
    most = max(owned.values(), default=0)
    return most + rows, most + of_stacks


@cache
def zero2_packed_bytes(job: Job, split: Split) -> int:
    """Bytes of new values that are sent in buffers: a part that is alone in its bucket is sent without one."""
    trained = [each for some in job.parts.parameters for each in some if not each.frozen]
    shapes = {torch.empty(each.shape, device="meta"): each for each in trained}
    owners, packed = zero2_owners(job, split), 0
    for bucket in make_buckets(list(shapes), job.bucket_bytes):
        parts: dict[int, list[int]] = {}
        for each in map(shapes.__getitem__, bucket):
            is_owned = each.name in owners
            size = math.prod(each.shape) if is_owned else held(each, split.shard)
            for rank in [owners[each.name]] if is_owned else range(split.shard):
                parts.setdefault(rank, []).append(size)
        packed += sum(sum(sizes) for sizes in parts.values() if len(sizes) > 1)
    return job.itemsize * packed


def rows_of(job: Job, split: Split) -> int:
    """Rows of the busiest data rank."""
    return -(-job.rows // split.data)


# ---- transfers


def gather_weights(job: Job, some: Sequence[int], split: Split) -> SplitTraffic:
    """Traffic to gather the weights of some parts, each by itself; with ZeRO-2 their new values."""
    if not split.is_fsdp:
        return _zero2(job, some, split, is_return=True) if split.sharding == "zero2" else SplitTraffic()
    num_bytes = job.gathered_itemsize * sum(job.parts.numel[part] for part in some)
    if split.shard == 1:
        return SplitTraffic()
    # Shards are copied into a buffer, and all of the buffer into the weights.
    copies = 2 * num_bytes * (1 + 1 / split.shard) / job.cost.memory_bytes_per_second
    return _ring(job.cost, split.axes[0], num_bytes, len(some)).plus(SplitTraffic(copies))


def reduce(job: Job, some: Sequence[int], split: Split) -> SplitTraffic:
    """Traffic to reduce gradients of some parts: over shards, then over replicas unless these are FlexDeMo's nodes."""
    trained = sum(job.parts.trained[part] for part in some)
    num_bytes = trained * (job.reduced_itemsize if split.is_fsdp else job.itemsize)
    shards, replicas = split.axes
    sums = _ring(job.cost, replicas, num_bytes / split.shard, len(some))  # An all-reduce is two of them.
    between = () if split.sharding == "flexdemo" else (sums, sums)
    if split.sharding == "zero2":
        return _zero2(job, some, split, is_return=False).plus(*between)
    scatter = _ring(job.cost, shards, num_bytes, len(some))
    # gloo's reduce-scatter sends as much as its all-reduce. FSDP2 copies gradients into a buffer.
    scatters = (scatter, scatter) if job.setting.is_cpu else (scatter,)
    copies = 2 * num_bytes / job.cost.memory_bytes_per_second if split.is_fsdp else 0.0
    return SplitTraffic(copies).plus(*scatters, *between)


def _zero2(job: Job, some: Sequence[int], split: Split, *, is_return: bool) -> SplitTraffic:
    """The share of some parts in the exchange over the shard axis, in one direction."""
    everything, shard, cost = max(1, sum(job.parts.trained)), split.shard, job.cost
    number = -(-job.itemsize * everything // job.bucket_bytes)
    bucket = job.itemsize * everything / number
    local = shard / split.axes[0][1]
    inside, between = bucket * (local - 1) / shard, bucket * (shard - local) / shard
    transfer = cost.transfer_seconds(inside, between)
    sums = (shard - 1) * cost.op_seconds + 3 * (inside + between) / cost.memory_bytes_per_second
    seconds = number * transfer if is_return else (number - 1) * max(transfer, sums) + transfer + sums
    share = sum(job.parts.trained[part] for part in some) / everything
    return SplitTraffic(share * seconds, share * number * inside, share * number * between)


def exchange_of_nodes(job: Job, split: Split) -> tuple[SplitTraffic, float]:
    """Traffic of a rank to the other nodes of a FlexDeMo in a step, and the seconds to encode and decode it."""
    trained = [each for some in job.parts.parameters for each in some if not each.frozen]
    sent = node_traffic(trained, Mesh(split.replicate, split.shard), job.flexdemo).sent / split.shard
    inside, between = (0.0, sent) if split.axes[1][1] > 1 else (sent, 0.0)
    traffic = SplitTraffic(job.cost.transfer_seconds(inside, between), inside, between)
    replicator = job.flexdemo.replicator
    if isinstance(replicator, LocalSteps):
        return traffic, 0.0
    numel = sum(held(each, split.shard) for each in trained)
    # A cosine transform is two products with a matrix of the side of a block, there and back.
    flops = 2 * 4 * replicator.chunk_size * numel if isinstance(replicator, DCTTopK) else 0
    num_bytes = _CODEC_TENSORS * STATE_ITEMSIZE * numel
    return traffic, flops / job.flops_per_second + num_bytes / job.cost.memory_bytes_per_second


def message(job: Job, rows: float) -> SplitTraffic:
    """Traffic of a pipeline's message, the input of a part for so many rows; between nodes if there are several."""
    num_bytes = rows * job.length * job.parts.inputs
    inside, between = (0.0, num_bytes) if job.num_ranks > job.node_ranks else (num_bytes, 0.0)
    return SplitTraffic(job.cost.transfer_seconds(inside, between), inside, between)


def _ring(cost: CostModel, axis: tuple[int, int], num_bytes: float, num_calls: int) -> SplitTraffic:
    """Traffic of all-gathers or reduce-scatters of so many bytes, each in a ring that enters every node once.

    A rank sends W (g - 1) / g of W bytes over g ranks; on n nodes, n of g steps go to another one.
    """
    size, nodes = axis
    sent = num_bytes * (size - 1) / size
    between = sent * nodes / size if nodes > 1 else 0.0
    seconds = num_calls * cost.transfer_seconds((sent - between) / num_calls, between / num_calls)
    return SplitTraffic(seconds, sent - between, between)


# ---- seconds


class Compute(NamedTuple):
    """Seconds of a pass through some parts."""

    forward: float
    backward_input: float
    backward_weight: float
    again: float  # Seconds of the forward that recomputed layers run again in backward.

    @property
    def backward(self) -> float:
        """Seconds of all parts of backward."""
        return self.backward_input + self.backward_weight + self.again


def compute_seconds(job: Job, some: Iterable[int], rows: float, *, recompute: bool) -> Compute:
    """Seconds to compute some parts for so many rows.

    A product with a weight takes 2 FLOPs per token and element forward, and as many for each of the gradients of its
    input and its weight. Attention's scores, and the values that they weigh, take ``4 * length * width`` per token and
    attention (:class:`~lightning_muon.cli.plan_parts.PlannedParts` says of which width), twice that in backward, all of
    it for the gradients of inputs (Chowdhery et al. 2022, arXiv:2204.02311, appendix B: 12 L H Q T in all).
    """
    parts, some = job.parts, list(some)
    scale = rows * job.length / job.flops_per_second
    products = sum(parts.product_flops[part] for part in some)
    scores = job.length * sum(parts.score_flops[part] for part in some)
    layers = [part for part in some if parts.is_layer[part]] if recompute else []
    again = sum(parts.product_flops[part] + job.length * parts.score_flops[part] for part in layers)
    return Compute(scale * (products + scores), scale * (products + 2 * scores), scale * products, scale * again)


def accumulation_seconds(job: Job, some: Iterable[int], split: Split) -> float:
    """Seconds to add the gradients of a pass to those of earlier ones: two tensors are read, one is written."""
    itemsize = job.reduced_itemsize if split.is_fsdp else job.itemsize
    return 3 * itemsize * sum(job.parts.trained[part] for part in some) / job.cost.memory_bytes_per_second


def seconds_without_pipeline(
    job: Job, split: Split, *, passes: int, recompute: bool, stays_whole: bool
) -> tuple[float, SplitTraffic]:
    """Seconds of all forwards and backwards, and traffic; with a FlexDeMo also between its nodes.

    Transfers of a pass overlap with its compute, except the gather of the first part and the sum of its gradients; on
    CPUs, whose cores do both, they do not.
    """
    everything = range(len(job.parts))
    all_weights, sums = gather_weights(job, everything, split), reduce(job, everything, split)
    compute = compute_seconds(job, everything, rows_of(job, split) / passes, recompute=recompute)
    gathers_once = stays_whole or not split.is_fsdp
    later = 0.0 if gathers_once else all_weights.seconds  # Gathers of later forwards, and of every backward.
    both = operator.add if job.setting.is_cpu else max
    seconds = both(compute.forward, all_weights.seconds)
    seconds += (passes - 1) * (both(compute.forward, later) + both(compute.backward, later))
    seconds += both(compute.backward, later + sums.seconds)
    seconds += (passes - 1) * accumulation_seconds(job, everything, split)
    if not job.setting.is_cpu:
        seconds += gather_weights(job, [0], split).seconds + reduce(job, [0], split).seconds
    traffic = sums.plus(*[all_weights] * (1 if gathers_once else 2 * passes))
    if split.sharding != "flexdemo":
        return seconds, traffic
    between, codec = exchange_of_nodes(job, split)
    return codec + step_seconds(job.flexdemo, between.seconds, seconds), traffic.plus(between)


def stage_costs(
    job: Job, split: Split, stages: Sequence[Sequence[int]], *, number: int, recompute: bool, splits_backward: bool
) -> StageCosts:
    """Costs of a pipeline of these stages; recomputation belongs to ``I``, and again to ``W`` if backward is split.

    The first stage, for whose ``I`` no rank waits, then runs its whole backward as ``W``.
    """
    rows = rows_of(job, split) / number
    inputs, weights, forwards = list[float](), list[float](), list[float]()
    for stage, some in enumerate(stages):
        compute = compute_seconds(job, some, rows, recompute=recompute)
        is_late = splits_backward and stage == 0
        forwards.append(compute.forward)
        inputs.append(0.0 if is_late else compute.backward_input + compute.again)
        again = compute.again if splits_backward else 0.0
        added = accumulation_seconds(job, some, split) * (number - 1) / number  # The first pass adds nothing.
        weights.append(added + (compute.backward if is_late else compute.backward_weight + again))
    return StageCosts(
        forward=tuple(forwards),
        backward_input=tuple(inputs),
        backward_weight=tuple(weights),
        communication=message(job, rows).seconds,
        unshard=tuple(gather_weights(job, some, split).seconds for some in stages),
        reduce_grad=tuple(reduce(job, some, split).seconds for some in stages),
    )


class OptimizerStep(NamedTuple):
    """Traffic of the rank that takes longest, and memory of the one that needs most."""

    traffic: SplitTraffic
    kept_bytes: int = 0  # Bytes of buffers that stay from step to step.
    working_bytes: int = 0  # Bytes of memory that is used during the step only.


def optimizer_step(job: Job, parameters: Sequence[ParameterShape], split: Split) -> OptimizerStep:
    """The step by :func:`simulated_step`, or a pass over memory if there is no Newton-Schulz."""
    best = simulated_step(job, parameters, split)
    if best is None:
        trained = [each for each in parameters if not each.frozen]
        is_flexdemo = split.sharding == "flexdemo"
        num_tensors = _SGD_TENSORS if is_flexdemo and job.flexdemo.base == "sgd" else ADAMW_TENSORS
        size = sum(held(each, split.shards_of_weights) for each in trained)
        return OptimizerStep(SplitTraffic(num_tensors * STATE_ITEMSIZE * size / job.cost.memory_bytes_per_second))
    leaves_node = dict(zip(("within a replica", "between replicas"), _spans_nodes(split), strict=True))
    sent = {False: 0.0, True: 0.0}
    for each in best.numbers["bytes"]:
        sent[leaves_node[each["axis"]]] += each["most"]
    traffic = SplitTraffic(best.timeline.makespan, sent[False], sent[True])
    return OptimizerStep(traffic, best.numbers["kept_buffer_bytes"], best.numbers["working_bytes"])


def simulated_step(job: Job, parameters: Sequence[ParameterShape], split: Split) -> Outcome | None:
    """Simulate the step of ParallelMuon with owners in each replica and on all of them; return the faster one.

    Nodes of a FlexDeMo do the same, each by itself. ``None`` if nothing is orthogonalized.
    """
    is_flexdemo = split.sharding == "flexdemo"
    is_elementwise = all(each.frozen or each.algorithm == "adamw" for each in parameters)
    if is_elementwise or (is_flexdemo and job.flexdemo.base != "muon"):
        return None
    setting = replace(
        job.setting,
        model=replace(job.setting.model, parameters=tuple(parameters)),
        mesh=Mesh(1 if is_flexdemo else split.replicate, split.shard),
        cost=job.cost.with_links(_spans_nodes(split)),
        owners=zero2_owners(job, split) if split.sharding == "zero2" else {},
    )
    outcomes = compare_strategies(setting, (PIPELINE, GRID), validates=False)
    return min(outcomes, key=lambda each: each.timeline.makespan)


def _spans_nodes(split: Split) -> list[bool]:
    """Whether shard groups span several nodes, and whether replicate groups do."""
    return [nodes > 1 for _, nodes in split.axes]
