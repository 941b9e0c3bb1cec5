"""Rules for the memory of a rank, for ``lightning-muon plan --ranks`` and ``--splits``.

A step is followed from part to part of the model: activations are freed while gradients are made, so the peaks of the
kinds are not at one time. docs/planning.md has the rules in words, beside measurements of real runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import NamedTuple

from lightning_muon.cli.split_rules import (
    Job,
    OptimizerStep,
    Split,
    held,
    held_by_parts,
    rows_of,
    zero2_elements,
    zero2_packed_bytes,
)
from lightning_muon.flexdemo.replicators import DiLoCo, LocalSteps
from lightning_muon.schedule.muon import STATE_ITEMSIZE
from lightning_muon.schedule.pipeline import Node, PipelineKind, peak_activations


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of a rank: the most of each kind, and the most of all together at one time."""

    weights: int
    gradients: int
    optimizer: int  # Optimizer state.
    activations: int
    gathered: int  # Whole weights beside the shards, or their copies in 16 bits.
    buffers: int  # Buffers of communication, and of the optimizer step.
    peak: int

    def to_dict(self) -> dict[str, int]:
        """All bytes but the peak, as a dict for JSON."""
        return {name: size for name, size in asdict(self).items() if name != "peak"}


class _Moment(NamedTuple):
    """Bytes at one time beside weights, state and the buffers that are kept from step to step."""

    gradients: float
    activations: float = 0
    gathered: float = 0
    buffers: float = 0


def _memory(weights: float, optimizer: float, kept: float, moments: Iterable[_Moment]) -> Memory:
    found = list(moments)
    most = _Moment(*map(max, zip(*found, strict=True)))
    return Memory(
        weights=round(weights),
        optimizer=round(optimizer),
        gradients=round(most.gradients),
        activations=round(most.activations),
        gathered=round(most.gathered),
        buffers=round(kept + most.buffers),
        peak=round(weights + optimizer + kept + max(map(sum, found))),
    )


def memory_without_pipeline(
    job: Job, split: Split, step: OptimizerStep, *, passes: int, recompute: bool, stays_whole: bool
) -> Memory:
    """Memory of a rank with so many passes of its rows; ``stays_whole``: FSDP gathers weights once in a step."""
    every, trained = map(sum, held_by_parts(job, split.shards_of_weights))
    gradients, kept, working = job.itemsize * trained, step.kept_bytes, step.working_bytes
    if split.sharding == "zero2":
        working = max(working, zero2_packed_bytes(job, split))  # All new values may be on their way at once.
        gradients = job.itemsize * zero2_elements(job, split)[0]
    elif split.sharding == "flexdemo" and not isinstance(job.flexdemo.replicator, LocalSteps):
        kept += STATE_ITEMSIZE * trained  # Blocks of the residuals.
        working += STATE_ITEMSIZE * trained + job.flexdemo.bucket_bytes  # Updates, and the bucket that is decoded.
    moments = _sharded_backward if split.is_fsdp else _whole_backward
    return _memory(
        job.itemsize * every,
        _state_bytes(job, split, tuple(range(len(job.parts)))),
        kept,
        [
            *moments(job, split, passes=passes, recompute=recompute, stays_whole=stays_whole),
            _Moment(gradients, buffers=working),
        ],
    )


def _activations(job: Job, split: Split, part: int, *, passes: int, recompute: bool) -> Iterator[tuple[int, int]]:
    """During a part's backward: the first part that has gradients, and bytes of the activations.

    Gradients of the logits are freed before those of the weights are made.
    """
    parts, tokens = job.parts, -(-rows_of(job, split) // passes) * job.length
    kept = sum(parts.kept(each, recompute=recompute) for each in range(part + 1))
    in_backward = parts.in_backward([part], recompute=recompute)
    if parts.loss_gradient[part]:
        yield part + 1, tokens * (kept + in_backward)
        in_backward = 0
    yield part, tokens * (kept + in_backward)


def _whole_backward(job: Job, split: Split, *, passes: int, recompute: bool, stays_whole: bool) -> Iterator[_Moment]:
    """Moments from the last part to the first one, with whole weights and gradients in buckets."""
    del stays_whole
    trained = job.parts.trained
    bucket, copies, own = job.bucket_bytes, 1.0 if split.data > 1 else 0.0, 1.0
    if split.sharding == "zero2":
        # A bucket as it arrives, as it is sent, and the shares of the other ranks.
        copies = 2 + (split.shard - 1) / split.shard
        own = zero2_elements(job, split)[0] / max(1, sum(trained))  # Share that a rank keeps of the sums.
    largest = max((math.prod(each.shape) for some in job.parts.parameters for each in some), default=0)
    bucket = max(bucket, job.itemsize * largest)
    for part in reversed(range(len(job.parts))):
        casts = job.casts_itemsize * sum(job.parts.numel[: part + 1])
        for first, activations in _activations(job, split, part, passes=passes, recompute=recompute):
            there = job.itemsize * sum(trained[first:])
            accumulated = job.itemsize * sum(trained[:first]) if passes > 1 else 0
            in_bucket = min(bucket, there)
            summed = there if own == 1 else own * (there - in_bucket)
            yield _Moment(summed + accumulated, activations, casts, copies * in_bucket)


def _sharded_backward(job: Job, split: Split, *, passes: int, recompute: bool, stays_whole: bool) -> Iterator[_Moment]:
    """Moments from the last part to the first one with FSDP2, and at last its root, which has all that is in no layer.

    The root's weights stay gathered, and its gradients whole, until the end. A layer has its gradients whole, and
    packed for their sum; the previous layer is gathered meanwhile.
    """
    parts, numel, trained = job.parts, job.parts.numel, job.parts.trained
    _, shards = held_by_parts(job, split.shard)
    layers = [part for part in range(len(parts)) if parts.is_layer[part]]
    roots = [part for part in range(len(parts)) if not parts.is_layer[part]]
    # Accumulated gradients are in the dtype of their sums.
    whole = job.gathered_itemsize if passes == 1 else job.reduced_itemsize
    packed = job.reduced_itemsize if split.shard > 1 else 0
    root_weights = job.gathered_itemsize * sum(numel[part] for part in roots)

    def gradients(part: int, first: int) -> int:
        """Bytes of gradients: shards of layers after ``part``, whole ones from ``first`` on, all if accumulated."""
        is_whole = [each for each in roots if each >= first or passes > 1]
        is_whole += [each for each in layers if first <= each == part or (passes > 1 and each <= part)]
        summed = sum(shards[each] for each in layers if each > part)
        return job.itemsize * summed + whole * sum(trained[each] for each in set(is_whole))

    for part in reversed(range(len(parts))):
        before = [each for each in layers if each <= part]
        is_open = before if stays_whole else before[-2:]
        gathered = root_weights + job.gathered_itemsize * sum(numel[each] for each in is_open)
        sent = packed * trained[part] if parts.is_layer[part] else 0
        for first, activations in _activations(job, split, part, passes=passes, recompute=recompute):
            yield _Moment(gradients(part, first), activations, gathered, sent)
    at_end = packed * sum(trained[part] for part in roots)
    yield _Moment(gradients(-1, -1), gathered=root_weights, buffers=at_end)


def memory_of_stages(
    job: Job,
    split: Split,
    nodes: Sequence[Node],
    stages: Sequence[Sequence[int]],
    step: OptimizerStep,
    *,
    number: int,
    recompute: bool,
) -> Memory:
    """Memory of a rank of a pipeline that runs ``nodes``; ``stages`` has the parts of each, ``number`` micro-batches.

    Gathered weights and gradients of its stages stay whole. A micro-batch keeps its activations from ``F`` to the end
    of its backward; between the two parts of a split one, ``I`` and ``W``, also the gradient of each product's output,
    from which ``W`` makes those of the weights (Qi et al. 2024, arXiv:2401.10241, section 2: it is M_W beside M_B). The
    first stage runs its whole backward as ``W``, see pipeline/batch_run.py, and keeps no such gradients.
    """
    parts, own = job.parts, tuple(part for stage in sorted({node.stage for node in nodes}) for part in stages[stage])
    every, trained = held_by_parts(job, split.shard)
    tokens = -(-rows_of(job, split) // number) * job.length
    kept = {
        stage: tokens * sum(parts.kept(part, recompute=recompute) for part in some) for stage, some in enumerate(stages)
    }
    between = {
        stage: tokens * sum(parts.output_bytes[part] for part in some) * (stage > 0)
        for stage, some in enumerate(stages)
    }
    numel = sum(parts.numel[part] for part in own)
    in_backward = parts.in_backward(own, recompute=recompute)
    if any(node.kind == PipelineKind.BACKWARD_INPUT for node in nodes):
        in_backward -= sum(parts.loss_gradient[part] for part in own)  # Of the logits, which is in `between`.
    activations = peak_activations(nodes, kept, between) + tokens * in_backward
    shards = job.itemsize * sum(trained[part] for part in own)
    return _memory(
        job.itemsize * sum(every[part] for part in own),
        _state_bytes(job, split, own),
        step.kept_bytes,
        [
            _Moment(job.reduced_itemsize * numel, activations, job.gathered_itemsize * numel),
            _Moment(shards, buffers=step.working_bytes),
        ],
    )


@cache
def _state_bytes(job: Job, split: Split, own: tuple[int, ...]) -> float:
    """Bytes of optimizer state for some parts, on the rank that holds most."""
    is_flexdemo = split.sharding == "flexdemo"
    momentum = job.itemsize
    of_elementwise = 2 * job.itemsize
    averages = 0.0
    if is_flexdemo and isinstance(job.flexdemo.replicator, LocalSteps):
        if isinstance(job.flexdemo.replicator, DiLoCo):
            averages = 2 * job.itemsize  # The weights of the last average, and the outer momentum.
    elif is_flexdemo:
        averages = STATE_ITEMSIZE  # Residuals.
        momentum = 2 * job.itemsize if job.flexdemo.base == "adamw" else 0
        of_elementwise = 0 if job.flexdemo.base == "sgd" else of_elementwise
    if split.sharding == "zero2":
        owned, matrices = zero2_elements(job, split)
        return momentum * matrices + of_elementwise * (owned - matrices)
    return sum(
        held(each, split.shards_of_weights) * (averages + (momentum if each.algorithm == "muon" else of_elementwise))
        for part in own
        for each in job.parts.parameters[part]
        if not each.frozen
    )
