"""What fits on some ranks, and what is fastest: memory and seconds of each way to train, in closed form.

A model is so many equal layers, and a root: all that is in no layer, such as the embedding and the output head.
docs/planning.md has the rules in words.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, NamedTuple, get_args

from lightning_muon.cli.plan_step import Setting
from lightning_muon.flexdemo.bucket import Shape, plan_buckets
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.replicators import DCTTopK, LocalSteps
from lightning_muon.params.layout import matrices_in
from lightning_muon.params.shapes import ParameterShape
from lightning_muon.pipeline.runtime import PipelineOptions
from lightning_muon.schedule.exchange import ADAMW_TENSORS, STATE_ITEMSIZE
from lightning_muon.schedule.program import scatter_buffers_for
from lightning_muon.sharding.ddp import BUCKET_BYTES

Mode = Literal["none", "ddp", "zero2", "fsdp", "hsdp", "pipeline", "flexdemo"]
GIB = 2**30
MODES: tuple[Mode, ...] = get_args(Mode)
PRECISIONS = {"32-true": (4, 4, 4), "bf16-mixed": (4, 2, 4), "bf16-true": (2, 2, 2)}
"""Bytes of an element of weights, gradients and state; of the weights that compute; of gradients that FSDP2 sums."""
# Bytes of a logit beside itself: its probability in float32, which backward needs, and two gradients of that size.
_LOGIT_BYTES = 12
# Tensors of parameter size that a FlexDeMo reads and writes to encode and decode, counted in flexdemo/bucket.py.
_CODEC_TENSORS = 15


class Counts(NamedTuple):
    """Numbers of some parameters."""

    numel: float = 0
    trained: float = 0
    muon: float = 0  # Elements of the matrices on Muon.
    matrices: float = 0  # Number of these matrices.
    newton_schulz: float = 0  # FLOPs for them.
    products: float = 0  # Elements that a token is multiplied with.
    activations: float = 0  # Elements per token that go into these products and come out.
    attention: float = 0  # Width of attention, all heads together.
    experts: float = 0  # Elements in stacks of matrices.

    def plus(self, other: Counts, times: float) -> Counts:
        """These, and ``times`` the other ones."""
        return Counts(*(one + times * two for one, two in zip(self, other, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A model, or a stage of it, in numbers."""

    layers: float  # Number of layers.
    layer: Counts  # Mean of the layers.
    root: Counts
    vocabulary: int  # Logits of a token.
    width: int  # Elements of a token between two layers.
    largest: int  # Elements of the largest parameter.
    matrix: tuple[int, int]  # Sides of the matrix that takes longest, the short one first.
    embedding: int  # Elements of the embedding.
    is_tied: bool  # Whether the embedding is the output head, too.

    @property
    def all(self) -> Counts:
        """Numbers of layers and root."""
        return self.root.plus(self.layer, self.layers)

    def stages(self, number: int) -> tuple[Sizes, Sizes, Sizes]:
        """The slowest, the first and the last of so many stages of whole layers, with about equal products."""
        head, table = self.root.products / self.layer.products, Counts(numel=self.embedding, trained=self.embedding)
        layers = (self.layers + head) / number
        of_last = self.root if self.is_tied else self.root.plus(table, -1)
        slowest = replace(self, layers=math.ceil(layers), root=Counts(), vocabulary=0)
        first = replace(slowest, layers=math.floor(layers), root=table)
        return slowest, first, replace(self, layers=max(0.0, slowest.layers - head), root=of_last)


def sizes_of(setting: Job) -> Sizes:
    """The numbers of a model; layers are told by the numbers in names."""
    model = setting.model
    named: defaultdict[str, list[ParameterShape]] = defaultdict(list)
    for each in model.parameters:
        words = each.name.split(".")
        number = next((index for index, word in enumerate(words) if word.isdigit()), -1)
        named[".".join(words[: number + 1])].append(each)
    layers = [some for name, some in named.items() if name and any(each.kind != "elementwise" for each in some)]
    inside = {each.name for some in layers for each in some}
    tables = [each for each in model.parameters if _is_embedding(each)]
    heads = [each for each in model.parameters if each.reason.startswith("output head")]
    head = heads[-1] if heads else tables[0] if tables else None
    matrices = [sides for each in model.parameters for sides in _matrices(each)]
    return Sizes(
        layers=len(layers),
        layer=Counts().plus(
            _counts([each for some in layers for each in some], head, setting), 1 / max(1, len(layers))
        ),
        root=_counts([each for each in model.parameters if each.name not in inside], head, setting),
        vocabulary=head.shape[0] if head else 0,
        width=next((each.shape[-1] for each in (*tables, *model.parameters) if len(each.shape) > 1), 0),
        largest=max(math.prod(each.shape) for each in model.parameters),
        matrix=max(matrices, key=lambda sides: setting.flops(*sides), default=(0, 0)),
        embedding=math.prod(tables[0].shape) if tables else 0,
        is_tied=not heads,
    )


def _is_embedding(parameter: ParameterShape) -> bool:
    return parameter.reason.startswith("embedding") and len(parameter.shape) == 2


def _matrices(parameter: ParameterShape) -> list[tuple[int, int]]:
    """Short and long side of each matrix that Muon trains."""
    if parameter.kind == "elementwise" or parameter.frozen:
        return []
    return [(min(sides), max(sides)) for _, *sides in matrices_in(parameter.shape, parameter)]


def _counts(parameters: Sequence[ParameterShape], head: ParameterShape | None, setting: Job) -> Counts:
    def used(each: ParameterShape) -> int:
        """Matrices of a parameter that a token meets."""
        return min(each.shape[0], setting.experts_per_token or each.shape[0]) if each.kind == "stack" else 1

    matrices = [sides for each in parameters for sides in _matrices(each)]
    products = [each for each in parameters if len(each.shape) > 1 and (each is head or not _is_embedding(each))]
    attention: dict[str, int] = {}  # It is as wide as the inputs of its last matrix, the output projection.
    for each in products:
        words = each.name.lower().split(".")
        found = [index for index, word in enumerate(words) if "attn" in word or "attention" in word]
        if found:
            attention[".".join(words[: found[0] + 1])] = each.shape[-1]
    return Counts(
        numel=sum(math.prod(each.shape) for each in parameters),
        trained=sum(math.prod(each.shape) for each in parameters if not each.frozen),
        muon=sum(short * long for short, long in matrices),
        matrices=len(matrices),
        newton_schulz=sum(setting.flops(*sides) for sides in matrices),
        products=sum(used(each) * math.prod(each.shape[each.kind == "stack" :]) for each in products),
        activations=sum(used(each) * (each.shape[-1] + each.shape[-2]) for each in products),
        attention=sum(attention.values()),
        experts=sum(math.prod(each.shape) for each in parameters if each.kind == "stack"),
    )


@dataclass(frozen=True, kw_only=True)
class Job(Setting):
    """A training: model, optimizer, machine and batch."""

    num_ranks: int
    node_ranks: int
    rows: int  # Rows of a step, of all ranks together.
    length: int  # Tokens of a row.
    memory_bytes: float  # That a rank may fill.
    precision: str
    flexdemo: FlexDeMoConfig
    expert_size: int = 1  # Ranks of a shard group among which whole experts are divided.
    experts_per_token: int = 0  # 0: all.

    def gathered(self, part: Counts) -> float:
        """Elements of some parameters that a rank has at one time: of its experts alone."""
        return part.numel - part.experts * (1 - 1 / self.expert_size)


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train. Ranks are numbered shard fastest, then replicate, then pipeline."""

    mode: Mode
    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    passes: int = 1  # Batches that are accumulated; with a pipeline its micro-batches.
    recompute: bool = False  # Activation checkpointing of the layers.

    @property
    def is_fsdp(self) -> bool:
        """Whether FSDP2 shards the weights."""
        return self.mode not in ("none", "ddp", "zero2")

    def tokens(self, job: Job) -> int:
        """Tokens of a pass, on the rank with most."""
        return -(-job.rows // (self.replicate * self.shard) // self.passes) * job.length

    def nodes(self, job: Job) -> tuple[int, int]:
        """Nodes over which a shard group is spread, and a replicate group."""
        replicas = -(-self.replicate * min(self.shard, job.node_ranks) // job.node_ranks)
        return -(-self.shard // job.node_ranks), replicas if self.replicate > 1 else 1


class Memory(NamedTuple):
    """Bytes of the rank with most: of each kind, and of all together at one time."""

    weights: float
    gradients: float
    state: float
    activations: float
    buffers: float  # Gathered weights, what travels, and what the optimizer works with.
    peak: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """A way, and what it takes."""

    way: Way
    memory: Memory
    seconds: float
    muon_seconds: float  # Counts of the seconds.
    fits: bool


def best_rows(job: Job) -> list[Row]:
    """For each mode the fastest way that fits, or else the one with least memory; those that fit first."""
    sizes = sizes_of(job)
    found = [
        min(rows, key=lambda row: (not row.fits, row.seconds if row.fits else row.memory.peak))
        for mode in MODES
        if (rows := [row_of(job, sizes, way) for way in _ways(job, mode, int(sizes.layers))])
    ]
    return sorted(found, key=lambda row: (not row.fits, row.seconds))


def row_of(job: Job, sizes: Sizes, way: Way) -> Row:
    """Memory and seconds of a way."""
    slowest, stages, on_their_way = sizes, (sizes,), (1,)
    if way.pipeline > 1:  # In 1F1B the first stage has as many micro-batches on their way as there are stages.
        slowest, *stages = sizes.stages(way.pipeline)
        on_their_way = (min(way.pipeline, way.passes), 1)
    memories = [
        _memory(job, stage, way, _muon_step(job, stage, way), on_their_way=number)
        for stage, number in zip(stages, on_their_way, strict=True)
    ]
    memory = max(memories, key=lambda each: each.peak)
    muon_seconds = _muon_step(job, slowest, way).seconds
    return Row(
        way=way,
        memory=memory,
        seconds=_model_seconds(job, slowest, way) + muon_seconds,
        muon_seconds=muon_seconds,
        fits=memory.peak <= job.memory_bytes,
    )


def _ways(job: Job, mode: Mode, most_stages: int) -> Iterator[Way]:
    """All splits of the ranks, numbers of passes, and whether layers are recomputed."""
    num_ranks = 1 if mode == "none" else job.num_ranks
    divisors = [each for each in range(1, num_ranks + 1) if num_ranks % each == 0]
    for pipeline, shard in product(divisors, divisors):
        replicate, rest = divmod(num_ranks, pipeline * shard)
        is_of_mode = {
            "none": True,
            "ddp": shard == 1 < replicate,
            "zero2": shard > 1,
            "fsdp": replicate == 1 < shard,
            "hsdp": replicate > 1 and shard > 1,
            "flexdemo": replicate > 1,
            "pipeline": pipeline <= most_stages,
        }
        rows = -(-job.rows // (replicate * shard)) if not rest and replicate * shard <= job.rows else 0
        if job.expert_size > 1 and (mode not in ("fsdp", "hsdp") or shard % job.expert_size):
            continue
        if not rows or not is_of_mode[mode] or (pipeline > 1) != (mode == "pipeline"):
            continue
        numbers = {min(rows, 1 << power) for power in range(rows.bit_length() + 1)}
        if pipeline > 1:  # The default of a run, and four times as many.
            numbers = {min(rows, times * PipelineOptions().num_microbatches(pipeline)) for times in (1, 4)}
        for recompute, passes in product((False, True), sorted(numbers)):
            yield Way(
                mode=mode, pipeline=pipeline, replicate=replicate, shard=shard, passes=passes, recompute=recompute
            )


def _memory(job: Job, sizes: Sizes, way: Way, step: _StepCost, *, on_their_way: int) -> Memory:
    """The peak is where backward begins, where it ends, or in the optimizer step."""
    (own, used, summed), every, root, layer = PRECISIONS[job.precision], sizes.all, sizes.root, sizes.layer
    weight_shards = way.shard if way.is_fsdp else 1
    shards = way.shard if way.mode == "zero2" else weight_shards  # Of gradients and state.
    updated = STATE_ITEMSIZE if way.mode == "zero2" else own  # It updates float32 weights.
    mains = updated * every.trained / shards if updated > own else 0.0
    weights, gradients = own * every.numel / weight_shards + mains, updated * every.trained / shards
    of_matrices, of_others, kept, working = 1, 2, step.kept, step.working  # Tensors of state, and bytes.
    if way.mode == "flexdemo":
        of_matrices, of_others = {"muon": (1, 2), "adamw": (2, 2), "sgd": (0, 0)}[job.flexdemo.base]
        working += STATE_ITEMSIZE * every.trained / shards + job.flexdemo.bucket_bytes  # Updates, and a bucket.
        if isinstance(job.flexdemo.replicator, LocalSteps):  # The last average, and the outer momentum.
            of_matrices, of_others = of_matrices + 2, of_others + 2
        else:  # The residual takes the place of the momentum, and is there as blocks, too.
            of_matrices, of_others = of_matrices + (job.flexdemo.base != "muon"), of_others + 1
            kept += STATE_ITEMSIZE * every.trained / shards
    state = updated * (of_matrices * every.muon + of_others * (every.trained - every.muon)) / shards
    of_layer = used * layer.activations
    of_head = (used + _LOGIT_BYTES) * sizes.vocabulary + used * sizes.width
    of_layers = on_their_way * sizes.layers * (used * sizes.width if way.recompute else of_layer)
    activations = way.tokens(job) * (of_layers + max(of_head, of_layer if way.recompute else 0))
    whole = sent = 0.0
    if way.pipeline > 1:  # A stage is gathered once, and its gradients stay whole until the last micro-batch.
        gathered, accumulated = used * every.numel, summed * every.trained
    elif way.is_fsdp:  # Gathered are the root and two layers.
        gathered = used * (root.numel + min(2, sizes.layers) * job.gathered(layer))
        accumulated = summed * every.trained / shards if way.passes > 1 else 0.0  # Sums of shards.
        # Gradients of the root stay whole until the end, and are packed to be summed.
        whole, sent = used * root.trained, used * root.numel + summed * root.trained
    else:
        gathered = used * every.numel if used < own else 0  # Copies that autocast makes.
        accumulated = updated * every.trained if way.passes > 1 else 0
        # A bucket to be sent; with zero2 also as it arrives, and the shares of the other ranks, which are widened.
        of_shares = (2 if updated > own else 0) + 1
        copies = 1 + updated / own + of_shares * (way.shard - 1) / way.shard
        copies = {"none": 0.0, "ddp": 1.0}.get(way.mode, copies)
        sent = copies * min(own * every.trained, max(BUCKET_BYTES, own * sizes.largest))
    moments = (accumulated + activations + gathered, gradients + whole + sent, gradients + working)
    return Memory(
        weights=weights,
        gradients=max(accumulated, gradients + whole),
        state=state,
        activations=activations,
        buffers=kept + max(gathered, sent, working),
        peak=weights + state + kept + max(moments),
    )


def _send(job: Job, num_bytes: float, between: float, calls: float = 1) -> float:
    """Seconds to send so many bytes in some calls, of them the share ``between`` to other nodes, side by side."""
    if not num_bytes:
        return 0.0
    waits = (calls - 1) * job.cost.latency_seconds[-1 if between else 0]
    return waits + job.cost.transfer_seconds(num_bytes * (1 - between), num_bytes * between)


def _transfers(job: Job, sizes: Sizes, way: Way) -> tuple[float, float, float]:
    """Seconds to gather all weights once, or with zero2 to send new values, and to sum all gradients.

    The last two are for the sums over the shard axis, and for those over the replicas.
    """
    (own, used, summed), part, calls = PRECISIONS[job.precision], sizes.all, sizes.layers + 1
    memory = job.cost.memory_bytes_per_second

    def ring(num_bytes: float, size: int, nodes: int) -> float:
        """Seconds of an all-gather or reduce-scatter in a ring that enters every node once."""
        return _send(job, num_bytes * (size - 1) / size, nodes / size if nodes > 1 else 0.0, calls)

    shard_nodes, replica_nodes = way.nodes(job)
    num_bytes = (summed if way.is_fsdp else own) * part.trained
    summed_bytes = STATE_ITEMSIZE * part.trained if way.mode == "zero2" else num_bytes
    sums = 2 * ring(summed_bytes / way.shard, way.replicate, replica_nodes) if way.mode != "flexdemo" else 0.0
    if way.mode == "zero2" and way.shard > 1:
        inside = min(way.shard, job.node_ranks)
        between = (way.shard - inside) / (way.shard - 1)
        there = _send(job, num_bytes * (way.shard - 1) / way.shard, between, math.ceil(num_bytes / BUCKET_BYTES))
        return there, there + 3 * num_bytes * (1 - 1 / way.shard) / memory, sums
    if not way.is_fsdp:
        return 0.0, 0.0, sums
    # Experts travel among the ranks that share them, which of S - 1 others are S / E - 1.
    at_home = part.experts * (way.shard - way.shard // job.expert_size) / max(1, way.shard - 1)
    copied = job.gathered(part)
    scatter = ring(num_bytes - summed * at_home, way.shard, shard_nodes)
    scatter *= 2 if job.is_cpu else 1  # gloo's sends as an all-reduce.
    # FSDP2 copies shards into a buffer and that into weights, and gradients into a buffer.
    gather = ring(used * (part.numel - at_home), way.shard, shard_nodes)
    gather += 2 * used * copied * (1 + 1 / way.shard) / memory
    return gather, scatter + 2 * summed * (copied - part.numel + part.trained) / memory, sums


def _model_seconds(job: Job, sizes: Sizes, way: Way) -> float:
    """Seconds of forward, backward and sums.

    A product takes 2 FLOPs per token and element forward, attention 4 per pair of tokens and element of its width, and
    backward twice that (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
    """
    part, layer, cost = sizes.all, sizes.layer, job.cost
    forward, again = (
        way.tokens(job) * (2 * some.products + 4 * job.length * some.attention) / cost.flops_per_second
        for some in (part, Counts().plus(layer, sizes.layers))
    )
    backward = 2 * forward + (again if way.recompute else 0)
    gather, scatter, sums = _transfers(job, sizes, way)
    # Further passes read two gradients and write one.
    adding = (way.passes - 1) * 3 * STATE_ITEMSIZE * part.trained / cost.memory_bytes_per_second
    if way.pipeline > 1:  # Of m + p - 1 times that a stage takes, p - 1 are the bubble.
        message = way.tokens(job) * sizes.width * PRECISIONS[job.precision][1]
        messages = 2 * _send(job, message, float(job.num_ranks > job.node_ranks))
        return gather + (way.passes + way.pipeline - 1) * max(forward + backward, messages) + adding + scatter + sums
    again, early = (gather, scatter) if way.is_fsdp else (0.0, 0.0)  # zero2 sends new values once.
    both = sum if job.is_cpu else max  # The cores of a CPU do both.
    seconds = both((forward, gather)) + (way.passes - 1) * (both((forward, again)) + both((backward, again + early)))
    seconds += both((backward, again + scatter + sums)) + adding
    if not job.is_cpu:  # Nothing hides the gather of the embedding, and the sum of its gradients.
        seconds += sizes.embedding / part.numel * (gather + scatter + sums)
    if job.expert_size > 1:  # Tokens go to their experts and back, and so do their gradients; nothing hides it.
        others = job.expert_size - 1
        sent = 4 * sizes.layers * job.experts_per_token * way.tokens(job) * sizes.width * PRECISIONS[job.precision][1]
        between = max(0, job.expert_size - job.node_ranks) / others
        seconds += way.passes * _send(job, sent * others / job.expert_size, between, 4 * sizes.layers)
    return seconds + (_exchange_seconds(job, part, way) if way.mode == "flexdemo" else 0)


def _exchange_seconds(job: Job, part: Counts, way: Way) -> float:
    """Seconds in which the nodes of a FlexDeMo encode, exchange and decode."""
    replicator, own, cost = job.flexdemo.replicator, part.trained / way.shard, job.cost
    is_between = float(way.nodes(job)[1] > 1)
    if isinstance(replicator, LocalSteps):
        num_bytes = 2 * (way.replicate - 1) / way.replicate * replicator.bits_per_parameter() / 8 * own
        return _send(job, num_bytes, is_between)
    shapes = [Shape(each.shape, each.shape) for each in job.model.parameters if not each.frozen]
    sent = sum(plan.sent_bytes(way.replicate) for plan in plan_buckets(shapes, job.flexdemo)) / way.shard
    # A cosine transform is two products with a matrix of the side of a block, there and back.
    flops = 2 * 4 * replicator.chunk_size * own if isinstance(replicator, DCTTopK) else 0
    codec = flops / cost.flops_per_second + _CODEC_TENSORS * STATE_ITEMSIZE * own / cost.memory_bytes_per_second
    return codec + _send(job, sent, is_between)


class _StepCost(NamedTuple):
    seconds: float
    kept: float = 0  # Bytes of buffers that stay from step to step.
    working: float = 0  # Bytes in the step.


def _muon_step(job: Job, sizes: Sizes, way: Way) -> _StepCost:
    """The optimizer step with owners in each replica, or on all of them, whichever is faster.

    With k buckets, whose arithmetic takes n and whose transfers take t seconds, it is ``n + t + (k - 1) max(n, t)``.
    """
    part, cost, config = sizes.all, job.cost, job.config
    held = part.trained / (1 if way.mode in ("none", "ddp") else way.shard)
    elementwise = ADAMW_TENSORS * STATE_ITEMSIZE * held / cost.memory_bytes_per_second
    if not part.muon or (way.mode == "flexdemo" and job.flexdemo.base != "muon"):
        return _StepCost(elementwise)
    (short, long), replicate = sizes.matrix, 1 if way.mode == "flexdemo" else way.replicate
    inside = 0.0 if way.mode == "zero2" else (way.shard - 1) / way.shard  # Of a matrix, what its owner does not have.
    shards_leave, replicas_leave = (float(nodes > 1) for nodes in way.nodes(job))
    found: list[_StepCost] = []
    for replicas in {1 if way.shard > 1 else replicate, replicate}:
        owners = way.shard * replicas
        share = job.wire_itemsize * part.muon / owners  # Bytes that a rank owns, as they travel.
        buckets = max(1, min(math.ceil(part.matrices / owners), math.ceil(share / config.bucket_bytes)))
        most = max(share / buckets, job.wire_itemsize * short * long)  # On the busiest rank of a bucket.
        gather = _send(job, most * inside, shards_leave)
        moved = gather + max(gather, _send(job, most * (replicas - 1), replicas_leave))
        flops = max(part.newton_schulz / owners, job.flops(short, long))
        work = (flops / cost.flops_per_second + elementwise) / buckets
        # Buckets on their way, each as it is sent and as it is received.
        gathered, scattered = (
            min(buckets, each) for each in (config.look_ahead, scatter_buffers_for(config.look_ahead))
        )
        found.append(
            _StepCost(
                seconds=work + moved + (buckets - 1) * max(work, moved),
                kept=2 * share / buckets * (gathered * inside + scattered * (inside + replicas - 1)),
                working=job.wire_itemsize * (3 * short * long + 2 * short**2),
            )
        )
    return min(found)
