"""How much memory a rank needs: the rules of ``lightning-muon plan --ranks`` and ``--splits``.

A step is followed from part to part of the model: activations go while gradients come, so the most of each kind is not
there at one time. docs/planning.md has the rules in words, beside what real runs need.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from lightning_muon.cli.split_rules import (
    Job,
    OptimizerStep,
    Split,
    held,
    is_sharded_by_fsdp,
    owned_elements,
    rows_of,
    zero2_exchange,
)
from lightning_muon.flexdemo.replicators import DiLoCo, LocalSteps
from lightning_muon.schedule.muon import STATE_ITEMSIZE
from lightning_muon.schedule.pipeline import Node, peak_activations
from lightning_muon.schedule.shapes import ParameterShape

_INT8 = 1 + 4 / 128  # A code, and the float32 maximum of a block: math/quantization.py.


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of a rank: the most of each kind, and the most of all together at one time."""

    weights: int
    gradients: int
    optimizer: int  # State.
    activations: int
    gathered: int  # Whole weights beside the shards, or their copies in 16 bits.
    buffers: int  # Of what travels, and of the optimizer step.
    peak: int

    def to_dict(self) -> dict[str, int]:
        """For JSON: without the peak."""
        return {name: size for name, size in asdict(self).items() if name != "peak"}


class _Moment(NamedTuple):
    """What there is beside weights, state and the buffers that are kept from step to step."""

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
    """Of a rank that takes its rows in so many passes; ``stays_whole``: FSDP gathers weights once in a step."""
    everything = [each for part in job.parts.parameters for each in part]
    weights = job.itemsize * sum(held(each, split.shards_of_weights) for each in everything)
    of_shard = sum(held(each, split.shards_of_weights) for each in everything if not each.frozen)
    kept = step.kept_bytes
    working = step.working_bytes
    gradients = job.itemsize * (owned_elements(job, split)[0] if split.mode == "zero2" else of_shard)
    if split.mode == "zero2":
        # All new values may be on their way at a time.
        working = max(working, job.itemsize * of_shard)
    elif split.mode == "flexdemo" and not isinstance(job.flexdemo.replicator, LocalSteps):
        kept += STATE_ITEMSIZE * of_shard  # Blocks of the residuals.
        working += STATE_ITEMSIZE * of_shard + job.flexdemo.chunk_bytes  # Decoded updates, and a bucket being encoded.
    end = _Moment(gradients=gradients, buffers=working)
    moments = _moments_of_backward(job, split, passes=passes, recompute=recompute, stays_whole=stays_whole)
    return _memory(weights, _state_bytes(job, split, everything), kept, [*moments, end])


def _moments_of_backward(
    job: Job, split: Split, *, passes: int, recompute: bool, stays_whole: bool
) -> Iterator[_Moment]:
    """From the last part of the model to the first one, while each has its gradients."""
    parts = job.parts
    tokens = -(-rows_of(job, split) // passes) * job.length
    trained = [sum(held(each, 1) for each in some if not each.frozen) for some in parts.parameters]
    shards = [
        sum(held(each, split.shards_of_weights) for each in some if not each.frozen) for some in parts.parameters
    ]
    # FSDP2's root has what is in no layer: its weights stay gathered, its gradients whole until the end.
    roots = [part for part in range(len(parts)) if not parts.is_layer[part]]
    root_weights = job.gathered_itemsize * sum(parts.numel[part] for part in roots)
    for part in reversed(range(len(parts))):
        activations = sum(parts.kept(each, recompute=recompute) for each in range(part + 1))
        activations = tokens * (activations + parts.in_backward([part], recompute=recompute))
        later = range(part + 1, len(parts))
        if not is_sharded_by_fsdp(split.mode):
            yield _Moment(
                *_whole_gradients(job, split, trained, part, passes=passes)[:1],
                activations,
                gathered=job.casts_itemsize * sum(parts.numel[: part + 1]),
                buffers=_whole_gradients(job, split, trained, part, passes=passes)[1],
            )
            continue
        layers = [each for each in range(part + 1) if parts.is_layer[each]]
        open_layers = layers if stays_whole else layers[-2:]  # One more is gathered ahead.
        gathered = root_weights + job.gathered_itemsize * sum(parts.numel[each] for each in open_layers)
        gradients = job.itemsize * sum(shards[each] for each in later if parts.is_layer[each])
        if passes > 1:
            gradients += job.reduced_itemsize * sum(trained[each] for each in (*roots, *layers))
        else:
            gradients += job.gathered_itemsize * sum(trained[each] for each in roots if each >= part)
            gradients += job.gathered_itemsize * trained[part] * parts.is_layer[part]
        packed = job.reduced_itemsize * trained[part] * (parts.is_layer[part] and split.shard > 1)
        yield _Moment(gradients, activations, gathered, packed)
    if is_sharded_by_fsdp(split.mode):
        own = sum(trained[part] for part in roots)
        itemsize = job.reduced_itemsize if passes > 1 else job.gathered_itemsize
        layers = job.itemsize * sum(shards[part] for part in range(len(parts)) if parts.is_layer[part])
        packed = job.reduced_itemsize * own * (split.shard > 1)
        yield _Moment(layers + itemsize * own, gathered=root_weights, buffers=packed)


def _whole_gradients(
    job: Job, split: Split, trained: Sequence[int], part: int, *, passes: int
) -> tuple[float, float]:
    """Bytes of gradients, and of the buckets that carry them, where weights are whole."""
    everything = job.itemsize * sum(trained)
    ready = everything if passes > 1 else job.itemsize * sum(trained[part:])
    if split.data == 1:
        return ready, 0
    if split.mode == "ddp":
        return ready, min(job.bucket_bytes, everything)
    # A bucket as it arrives, as it is sent, and the shares of the other ranks.
    own = job.itemsize * owned_elements(job, split)[0] * sum(trained[part:]) / max(1, sum(trained))
    bucket = min(zero2_exchange(job, split).bucket_bytes, everything)
    rest = job.itemsize * sum(trained[: part + 1]) if passes > 1 else 0
    return own + rest, bucket * (2 + (split.shard - 1) / split.shard)


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
    """Of a rank of a pipeline that runs ``nodes``; ``stages`` are the parts of all stages, ``number`` micro-batches.

    Gathered weights and gradients of its stages stay whole. A micro-batch keeps its activations from ``F`` to the end
    of its backward; between the two parts of a split one, ``I`` and ``W``, also the gradient of what each product
    returns, from which ``W`` makes those of the weights (Qi et al. 2024, arXiv:2401.10241, section 2: it is M_W beside
    M_B). The first stage runs its whole backward as ``W``, see pipeline/batch_run.py, and keeps no such gradients.
    """
    parts, own = job.parts, [part for stage in sorted({node.stage for node in nodes}) for part in stages[stage]]
    parameters = [each for part in own for each in parts.parameters[part]]
    tokens = -(-rows_of(job, split) // number) * job.length
    kept = {
        stage: tokens * sum(parts.kept(part, recompute=recompute) for part in some) for stage, some in enumerate(stages)
    }
    between = {
        stage: tokens * sum(parts.output_bytes[part] for part in some) * (stage > 0)
        for stage, some in enumerate(stages)
    }
    numel = sum(parts.numel[part] for part in own)
    activations = peak_activations(nodes, kept, between) + tokens * parts.in_backward(own, recompute=recompute)
    shards = job.itemsize * sum(held(each, split.shard) for each in parameters if not each.frozen)
    return _memory(
        job.itemsize * sum(held(each, split.shard) for each in parameters),
        _state_bytes(job, split, parameters),
        step.kept_bytes,
        [
            _Moment(job.reduced_itemsize * numel, activations, job.gathered_itemsize * numel),
            _Moment(shards, buffers=step.working_bytes),
        ],
    )


def _state_bytes(job: Job, split: Split, parameters: Sequence[ParameterShape]) -> float:
    """Of the optimizer, on the rank that holds most."""
    config, is_flexdemo = job.setting.config, split.mode == "flexdemo"
    momentum = _INT8 if config.momentum_dtype == "int8" else job.itemsize
    if config.offload == "momentum" and job.setting.machine != "cpu":
        momentum = 0
    of_elementwise = 2 * job.itemsize
    averages = 0.0
    if is_flexdemo and isinstance(job.flexdemo.replicator, LocalSteps):
        if isinstance(job.flexdemo.replicator, DiLoCo):
            averages = 2 * job.itemsize  # The weights of the last average, and the outer momentum.
    elif is_flexdemo:
        averages = STATE_ITEMSIZE  # Residuals.
        momentum = 2 * job.itemsize if job.flexdemo.base == "adamw" else 0
        of_elementwise = 0 if job.flexdemo.base == "sgd" else of_elementwise
    if split.mode == "zero2":
        own, matrices = owned_elements(job, split)
        return momentum * matrices + of_elementwise * (own - matrices)
    return sum(
        held(each, split.shards_of_weights) * (averages + (momentum if each.algorithm == "muon" else of_elementwise))
        for each in parameters
        if not each.frozen
    )
