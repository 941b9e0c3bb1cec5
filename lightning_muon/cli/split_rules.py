"""The rules of ``lightning-muon plan --splits``: memory of a rank, transfers, and seconds of a step.

Pure functions of sizes and rates. docs/planning.md has them in words, beside what real runs come to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from lightning_muon.cli.plan_model import Mesh
from lightning_muon.cli.plan_parts import PlannedParts
from lightning_muon.cli.plan_strategies import GRID, PIPELINE, Setting, compare_strategies
from lightning_muon.schedule.cost import CostModel
from lightning_muon.schedule.muon import ADAMW_TENSORS, STATE_ITEMSIZE
from lightning_muon.schedule.pipeline import Node, StageCosts, peak_activations
from lightning_muon.schedule.shapes import ParameterShape


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, and on which machine."""

    parts: PlannedParts
    setting: Setting  # Of the optimizer step, and the rates.
    num_ranks: int
    node_ranks: int
    rows: int  # Of a batch, of all ranks together.
    length: int  # Tokens of a row.
    # Bytes of an element: of weights, gradients and optimizer state; gathered; and of gradients that are summed.
    itemsize: int
    gathered_itemsize: int
    reduced_itemsize: int

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

    @property
    def data(self) -> int:
        """Ranks with different rows."""
        return self.replicate * self.shard

    @cached_property
    def axes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Ranks of a shard group and the nodes on which it lies at most; the same of a replicate group."""
        shards, replicas = self._nodes_of(1, self.shard), self._nodes_of(self.shard, self.replicate)
        return (self.shard, shards), (self.replicate, replicas)

    def _nodes_of(self, stride: int, size: int) -> int:
        """Of groups of so many ranks, each so far from the next."""
        firsts = range(0, self.data * self.pipeline, stride * size)
        # Groups that begin at the same place of a node lie alike.
        starts = {(first + at) % self.node_ranks for first in firsts for at in range(stride)}
        return max(len({(at + stride * i) // self.node_ranks for i in range(size)}) for at in starts)


class SplitTraffic(NamedTuple):
    """Seconds of transfers, and what a rank sends in them."""

    seconds: float = 0.0
    inside: float = 0.0  # Bytes within the node.
    between: float = 0.0  # Bytes to other nodes.

    def plus(self, *others: SplitTraffic) -> SplitTraffic:
        """One after the other."""
        return SplitTraffic(*map(sum, zip(self, *others, strict=True)))


# ---- memory: bytes of a rank, by what they are for


def memory_without_pipeline(
    job: Job, split: Split, *, passes: int, recompute: bool, stays_whole: bool
) -> dict[str, int]:
    """Of FSDP or HSDP that takes its rows in so many passes; ``stays_whole``: weights until the end of backward.

    Gradients are a shard and one whole part, or all whole if passes accumulate them. Gathered are the two largest
    parts, or all that stays whole.
    """
    parts, everything = job.parts, range(len(job.parts))
    weights, trained, state = held_elements(parts, everything, split.shard)
    kept = sum(parts.kept(part, recompute=recompute) for part in everything)
    kept += parts.in_backward(everything, recompute=recompute)
    return {
        "weights": job.itemsize * weights,
        "gradients": job.reduced_itemsize * (trained + max(parts.numel) if passes == 1 else sum(parts.numel)),
        "optimizer": job.itemsize * state,
        "activations": -(-rows_of(job, split) // passes) * job.length * kept,
        "gathered": job.gathered_itemsize * sum(parts.numel if stays_whole else sorted(parts.numel)[-2:]),
    }


def memory_of_stages(
    job: Job, split: Split, nodes: Sequence[Node], stages: Sequence[Sequence[int]], *, number: int, recompute: bool
) -> dict[str, int]:
    """Of a rank of a pipeline that runs ``nodes``; ``stages`` are the parts of all stages, ``number`` micro-batches.

    Gathered weights and gradients of its stages stay whole. A micro-batch keeps its activations from ``F`` to the end
    of its backward; between the two parts of a split one, ``I`` and ``W``, also the gradient of what each product
    returns, from which ``W`` makes those of the weights (Qi et al. 2024, arXiv:2401.10241, section 2: it is M_W beside
    M_B). The first stage runs its whole backward as ``W``, see pipeline/batch_run.py, and keeps no such gradients.
    """
    parts, own = job.parts, [part for stage in sorted({node.stage for node in nodes}) for part in stages[stage]]
    weights, _, state = held_elements(parts, own, split.shard)
    tokens = -(-rows_of(job, split) // number) * job.length
    kept = {
        stage: tokens * sum(parts.kept(part, recompute=recompute) for part in some) for stage, some in enumerate(stages)
    }
    between = {
        stage: tokens * sum(parts.output_bytes[part] for part in some) * (stage > 0)
        for stage, some in enumerate(stages)
    }
    numel = sum(parts.numel[part] for part in own)
    return {
        "weights": job.itemsize * weights,
        "gradients": job.reduced_itemsize * numel,
        "optimizer": job.itemsize * state,
        "activations": peak_activations(nodes, kept, between) + tokens * parts.in_backward(own, recompute=recompute),
        "gathered": job.gathered_itemsize * numel,
    }


def held_elements(parts: PlannedParts, some: Iterable[int], num_shards: int) -> tuple[int, int, int]:
    """Elements on the rank that holds most of these parts: of weights, of trained ones, and of optimizer state."""
    weights = trained = state = 0
    for each in (each for part in some for each in parts.parameters[part]):
        held = _largest_shard(each, num_shards)
        weights += held
        if not each.frozen:
            trained += held
            state += held * (1 if each.algorithm == "muon" else 2)
    return weights, trained, state


def rows_of(job: Job, split: Split) -> int:
    """Of the data rank with most."""
    return -(-job.rows // split.data)


def _largest_shard(parameter: ParameterShape, num_shards: int) -> int:
    """Elements on the first rank, which FSDP2 gives most."""
    if not parameter.shape:
        return 1
    size = parameter.shape[parameter.shard_dim]
    return -(-size // num_shards) * (math.prod(parameter.shape) // max(1, size))


# ---- transfers


def gather_weights(job: Job, some: Sequence[int], split: Split) -> SplitTraffic:
    """Of the weights of some parts, each by itself."""
    numel = sum(job.parts.numel[part] for part in some)
    return _ring(job.cost, split.axes[0], job.gathered_itemsize * numel, len(some))


def reduce(job: Job, some: Sequence[int], split: Split) -> SplitTraffic:
    """Of their gradients: over the shards, and what is left over the replicas."""
    num_bytes = job.reduced_itemsize * sum(job.parts.numel[part] for part in some)
    shards, replicas = split.axes
    sums = _ring(job.cost, replicas, num_bytes / split.shard, len(some))  # An all-reduce is two of them.
    return _ring(job.cost, shards, num_bytes, len(some)).plus(sums, sums)


def message(job: Job, rows: float) -> SplitTraffic:
    """Of a pipeline, of what a part gets for so many rows; between nodes as soon as there are several."""
    num_bytes = rows * job.length * job.parts.inputs
    inside, between = (0.0, num_bytes) if job.num_ranks > job.node_ranks else (num_bytes, 0.0)
    return SplitTraffic(job.cost.transfer_seconds(inside, between), inside, between)


def _ring(cost: CostModel, axis: tuple[int, int], num_bytes: float, num_calls: int) -> SplitTraffic:
    """All-gathers or reduce-scatters of so many bytes, each in a ring that enters every node once.

    Of W bytes over g ranks a rank sends W (g - 1) / g, and on n nodes n of g steps go to another one.
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
    again: float  # Of the forward that recomputed layers run once more in backward.

    @property
    def backward(self) -> float:
        """All of it."""
        return self.backward_input + self.backward_weight + self.again


def compute_seconds(job: Job, some: Iterable[int], rows: float, *, recompute: bool) -> Compute:
    """Of so many rows.

    A product with a weight takes 2 FLOPs per token and element forward, and as many for each of the gradients of its
    input and its weight. Attention's scores, and the values that they weigh, take ``4 * length * width`` per token and
    attention (:class:`~lightning_muon.cli.plan_parts.PlannedParts` says of which width), twice that in backward, all of
    it for the gradients of inputs (Chowdhery et al. 2022, arXiv:2204.02311, appendix B: 12 L H Q T in all).
    """
    parts, some = job.parts, list(some)
    scale = rows * job.length / job.cost.flops_per_second
    products = sum(parts.product_flops[part] for part in some)
    scores = job.length * sum(parts.score_flops[part] for part in some)
    layers = [part for part in some if parts.is_layer[part]] if recompute else []
    again = sum(parts.product_flops[part] + job.length * parts.score_flops[part] for part in layers)
    return Compute(scale * (products + scores), scale * (products + 2 * scores), scale * products, scale * again)


def seconds_without_pipeline(
    job: Job, split: Split, *, passes: int, recompute: bool, stays_whole: bool
) -> tuple[float, SplitTraffic]:
    """Of all forwards and backwards, and what travels.

    Transfers of a pass run behind its compute, but for the gather of the first part and the sum of its gradients.
    """
    everything = range(len(job.parts))
    all_weights, sums = gather_weights(job, everything, split), reduce(job, everything, split)
    compute = compute_seconds(job, everything, rows_of(job, split) / passes, recompute=recompute)
    later = 0.0 if stays_whole else all_weights.seconds  # Of every forward but the first, and of every backward.
    seconds = max(compute.forward, all_weights.seconds)
    seconds += (passes - 1) * (max(compute.forward, later) + max(compute.backward, later))
    seconds += max(compute.backward, later + sums.seconds)
    seconds += gather_weights(job, [0], split).seconds + reduce(job, [0], split).seconds
    return seconds, sums.plus(*[all_weights] * (1 if stays_whole else 2 * passes))


def stage_costs(
    job: Job, split: Split, stages: Sequence[Sequence[int]], *, number: int, recompute: bool, splits_backward: bool
) -> StageCosts:
    """Of a pipeline of these stages; what is computed again belongs to ``I``, and to ``W`` once more if that is apart.

    The first stage, for whose ``I`` nobody waits, then runs its whole backward as ``W``.
    """
    rows = rows_of(job, split) / number
    inputs, weights, forwards = list[float](), list[float](), list[float]()
    for stage, some in enumerate(stages):
        compute = compute_seconds(job, some, rows, recompute=recompute)
        is_late = splits_backward and stage == 0
        forwards.append(compute.forward)
        inputs.append(0.0 if is_late else compute.backward_input + compute.again)
        again = compute.again if splits_backward else 0.0
        weights.append(compute.backward if is_late else compute.backward_weight + again)
    return StageCosts(
        forward=tuple(forwards),
        backward_input=tuple(inputs),
        backward_weight=tuple(weights),
        communication=message(job, rows).seconds,
        unshard=tuple(gather_weights(job, some, split).seconds for some in stages),
        reduce_grad=tuple(reduce(job, some, split).seconds for some in stages),
    )


def optimizer_step(job: Job, parameters: Sequence[ParameterShape], split: Split) -> SplitTraffic:
    """The simulated step of ParallelMuon, whichever is faster: owners in a replica, or on all of them together."""
    spans = [nodes > 1 for _, nodes in split.axes]
    trained = [each for each in parameters if not each.frozen]
    if all(each.algorithm == "adamw" for each in trained):
        held = sum(_largest_shard(each, split.shard) for each in trained)
        return SplitTraffic(ADAMW_TENSORS * STATE_ITEMSIZE * held / job.cost.memory_bytes_per_second)
    setting = replace(
        job.setting,
        model=replace(job.setting.model, parameters=tuple(parameters)),
        mesh=Mesh(split.replicate, split.shard),
        cost=job.cost.with_links(spans),
    )
    outcomes = compare_strategies(setting, (PIPELINE, GRID), validates=False)
    best = min(outcomes, key=lambda each: each.timeline.makespan)
    leaves_node = {"within a replica": spans[0], "between replicas": spans[1]}
    sent = {False: 0.0, True: 0.0}
    for each in best.numbers["bytes"]:
        sent[leaves_node[each["axis"]]] += each["most"]
    return SplitTraffic(best.timeline.makespan, sent[False], sent[True])
