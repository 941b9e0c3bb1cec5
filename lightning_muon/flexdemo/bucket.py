"""Packs the momenta of some parameters of one rank into a message, and makes updates from the messages of all nodes.

A message of a rank has parts: batches of blocks of one shape each, and at last the parameters that are sent dense. A
part is its indices, if the replicator sends any, and its values, both beginning at multiples of 8 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import Work

from lightning_muon.comm.collectives import AxisGroup, start_all_reduce_sum, start_messages
from lightning_muon.compat import foreach
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.replicators import Components, ExchangeStep, Full, Replicator
from lightning_muon.params.layout import local_tensor

# Coefficients of blocks that are summed at a time on a CPU: 2 MiB, which stay in a cache.
_SUMMED_TOGETHER = 1 << 19
VALUE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_ALIGNMENT = 8
# Dtypes of indices, and the most elements of a block for which they do.
_INDICES = {torch.uint8: 1 << 8, torch.uint16: 1 << 16, torch.int32: 1 << 31}


@dataclass(frozen=True)
class BlockRange:
    """The blocks of one parameter in those of its part."""

    number: int  # Number of the parameter, in the order of the model.
    rows: int  # Rows of its local shard, read as a matrix.
    cols: int  # Columns of it.
    first: int  # First block, or first element where there are no blocks.
    count: int  # Number of blocks, or of elements.


@dataclass(frozen=True)
class MessagePart:
    """Blocks of one shape that are encoded as one batch."""

    replicator: Replicator  # Encodes them.
    block_shape: tuple[int, ...]  # `()` if the part is one block of `block_numel` elements.
    num_blocks: int  # In this part.
    block_numel: int  # Elements of a block, padding included.
    ranges: tuple[BlockRange, ...]  # The parameters.

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of the batch that the replicator gets: (num_blocks, *block_shape)."""
        return (self.num_blocks, *(self.block_shape or (self.block_numel,)))

    @property
    def sent_shape(self) -> tuple[int, int]:
        """Shape of what is sent, indices and values: (num_blocks, num_sent)."""
        return self.num_blocks, self.replicator.num_sent(self.block_numel)

    @property
    def index_dtype(self) -> torch.dtype:
        """Dtype in which the indices of elements of a block are sent."""
        return next(dtype for dtype, most in _INDICES.items() if self.block_numel <= most)


@dataclass(frozen=True)
class BucketPlan:
    """The parts of the message of one rank for some parameters."""

    members: tuple[int, ...]  # Numbers of the parameters, in the order in which backward finishes them.
    parts: tuple[MessagePart, ...]  # Without those that are empty on this rank.
    value_dtype: torch.dtype  # Dtype in which values are sent.

    def message_bytes(self) -> int:
        """Bytes of the message: all indices and values, and what fills them up."""
        sizes: list[int] = []
        for part in self.parts:
            numel = math.prod(part.sent_shape)
            sizes += [numel * part.index_dtype.itemsize] if part.replicator.sends_indices else []
            sizes.append(numel * self.value_dtype.itemsize)
        return sum(size + padding(size) for size in sizes)

    def is_summed(self, num_nodes: int) -> bool:
        """Whether the values of all nodes are summed on the way (all-reduce), since they have the same indices.

        Messages between two nodes are as many bytes, and are summed in float32.
        """
        return num_nodes > 2 and bool(self.parts) and not any(part.replicator.sends_indices for part in self.parts)

    def sent_bytes(self, num_nodes: int) -> int:
        """Bytes that a rank sends to other nodes: R - 1 messages, or 2 (R - 1) / R where values are summed."""
        if not self.is_summed(num_nodes):
            return (num_nodes - 1) * self.message_bytes()
        num_values = sum(math.prod(part.sent_shape) for part in self.parts)
        return 2 * (num_nodes - 1) * num_values * self.value_dtype.itemsize // num_nodes


def padding(num_bytes: int) -> int:
    """Bytes that fill up ``num_bytes`` of a message, so that what follows can be viewed in any dtype."""
    return -num_bytes % _ALIGNMENT


@dataclass(frozen=True)
class Shape:
    """Shape of a parameter, for the planner."""

    whole: tuple[int, ...]
    local: tuple[int, ...]  # Shape of the calling rank's shard.

    @property
    def numel(self) -> int:
        """Number of elements of all shards."""
        return math.prod(self.whole)

    def is_dense(self, dense_below: int) -> bool:
        """Whether the parameter is sent whole."""
        return len(self.whole) < 2 or self.numel < dense_below

    def as_matrix(self) -> tuple[int, int]:
        """Rows and columns of the shard, read as a row-major matrix; the whole matrix is as square as possible."""

        def elongation(dim: int) -> float:
            sides = math.prod(self.whole[:dim]), math.prod(self.whole[dim:])
            return max(sides) / max(1, min(sides))

        best = min(range(1, max(2, len(self.whole))), key=elongation)
        return math.prod(self.local[:best]), math.prod(self.local[best:])


def plan_buckets(shapes: Sequence[Shape], config: FlexDeMoConfig) -> list[BucketPlan]:
    """Make buckets for parameters in the order of the model, by global shapes only, the last parameter first."""
    replicator = config.replicator
    assert isinstance(replicator, Replicator)
    buckets: list[list[int]] = []
    room = 0
    for number in reversed(range(len(shapes))):
        num_bytes = 4 * shapes[number].numel
        if not buckets or num_bytes > room:
            buckets.append([])
            room = config.bucket_bytes
        buckets[-1].append(number)
        room -= num_bytes
    plans: list[BucketPlan] = []
    for members in buckets:
        dense = [number for number in members if shapes[number].is_dense(config.dense_below)]
        compressed = [number for number in members if number not in dense]
        parts = _parts(compressed, shapes, replicator) + _parts(dense, shapes, Full())
        plans.append(BucketPlan(tuple(members), tuple(parts), VALUE_DTYPES[config.value_format]))
    return plans


def _parts(members: Sequence[int], shapes: Sequence[Shape], replicator: Replicator) -> list[MessagePart]:
    """The parts for parameters of one kind, without those that have no elements on this rank."""
    by_shape: dict[tuple[int, ...], list[BlockRange]] = {}
    for number in members:
        rows, cols = shapes[number].as_matrix()
        if rows * cols == 0:
            continue
        block_shape = replicator.block_shape(rows, cols)
        count = math.ceil(rows * cols / math.prod(block_shape))
        if len(block_shape) == 2:
            count = math.ceil(rows / block_shape[0]) * math.ceil(cols / block_shape[1])
        ranges = by_shape.setdefault(block_shape, [])
        first = ranges[-1].first + ranges[-1].count if ranges else 0
        ranges.append(BlockRange(number, rows, cols, first, count))
    parts: list[MessagePart] = []
    for block_shape, ranges in by_shape.items():
        total = ranges[-1].first + ranges[-1].count
        num_blocks, block_numel = (total, math.prod(block_shape)) if block_shape else (1, total)
        parts.append(MessagePart(replicator, block_shape, num_blocks, block_numel, tuple(ranges)))
    return parts


class MomentumBucket:
    """Parameters that are sent together; ``residuals``, like their shards in float32, are read and written.

    ``parameters`` are those of all buckets, by the numbers in ``plan``. In each step :meth:`accumulate`, :meth:`send`
    and :meth:`receive` are called.
    """

    def __init__(self, plan: BucketPlan, parameters: Sequence[Tensor], residuals: Mapping[Tensor, Tensor]) -> None:
        self.plan = plan
        self.parameters = [parameters[number] for number in plan.members]
        self._all = parameters
        self._device = next(iter(residuals.values())).device
        self._batches = [torch.zeros(part.batch_shape, dtype=torch.float32, device=self._device) for part in plan.parts]
        batches = zip(plan.parts, self._batches, strict=True)
        self._views = [self._views_of(part, batch, residuals) for part, batch in batches]
        self._received: Tensor | None = None

    def accumulate(self, gradients: Mapping[Tensor, Tensor], decay: float) -> None:
        """Blocks <- decay * residual + gradient, the local one of each parameter; without one decay * residual."""
        gradients = {tensor: gradients[tensor].contiguous() for tensor in self.parameters if tensor in gradients}
        for part, batch, views in zip(self.plan.parts, self._batches, self._views, strict=True):
            if batch.numel() > sum(each.rows * each.cols for each in part.ranges):
                batch.zero_()  # Some elements belong to no parameter.
            foreach.copy_([into for _, into, _ in views], [residual for _, _, residual in views])
            batch.mul_(decay)
            added = self._views_of(part, batch, gradients)
            if added:
                foreach.add_([into for _, into, _ in added], [gradient for _, _, gradient in added])

    def send(self, step: ExchangeStep, taking_part: Set[Tensor], group: AxisGroup) -> None:
        """Begin to send components of the blocks; subtract them from the residuals of what takes part in the step.

        Collective over ``group``, the ranks of all nodes with the same shards. Nothing is sent if no rank holds
        anything of the bucket.
        """
        plan, sent = self.plan, self.encode(step)
        self._step, self._taking_part, self._num_nodes = step, taking_part, group.size
        self._works: Sequence[Work] = ()
        if plan.is_summed(group.size):
            self._received = torch.cat([values.flatten() for values, _ in sent]).to(plan.value_dtype)
            self._works = [start_all_reduce_sum(self._received, group)]
        elif plan.parts:
            message = pack(plan, sent)
            # The message of each node; kept until all is sent.
            self._received = message.new_empty(group.size, message.numel())
            self._received[group.rank] = message
            others = {node: self._received[node] for node in range(group.size) if node != group.rank}
            self._works = start_messages(dict.fromkeys(others, self._received[group.rank]), others, group)
        self.subtract_sent(sent, step, taking_part)

    def receive(self, rule: str, *, sign: bool) -> dict[Tensor, Tensor]:
        """Update of each parameter that takes part: float32, with the shape of its shard. Waits for all nodes."""
        for work in self._works:
            work.wait()
        merged = self._merged(rule) if self.plan.parts else []
        self._received = None  # Frees the memory.
        return self.decode(merged, self._step, self._taking_part, sign=sign)

    def encode(self, step: ExchangeStep) -> list[Components]:
        """Components to send of each part, their values rounded as the other nodes get them."""
        components: list[Components] = []
        for part, batch in zip(self.plan.parts, self._batches, strict=True):
            values, indices = part.replicator.encode(batch, step)
            # A copy: the batch changes while the values are being sent.
            components.append(Components(values.to(self.plan.value_dtype, copy=True).float(), indices))
        return components

    def subtract_sent(self, sent: Sequence[Components], step: ExchangeStep, taking_part: Set[Tensor]) -> None:
        """Residual <- blocks - what was sent, for the parameters that take part in the step."""
        for part, batch, views, components in zip(self.plan.parts, self._batches, self._views, sent, strict=True):
            part.replicator.subtract_(batch, components, step)
            wanted = [(blocks, residual) for tensor, blocks, residual in views if tensor in taking_part]
            if wanted:
                foreach.copy_([residual for _, residual in wanted], [blocks for blocks, _ in wanted])

    def _merged(self, rule: str) -> list[Components]:
        """The mean over the nodes of each part."""
        assert self._received is not None
        parts = self.plan.parts
        if self.plan.is_summed(self._num_nodes):
            pieces = self._received.float().div_(self._num_nodes).split([math.prod(part.sent_shape) for part in parts])
            return [Components(piece.view(part.sent_shape), None) for piece, part in zip(pieces, parts, strict=True)]
        of_nodes = [unpack(self.plan, message) for message in self._received]
        return [merge([each[index] for each in of_nodes], rule, part.block_numel) for index, part in enumerate(parts)]

    def decode(
        self, merged: Sequence[Components], number: ExchangeStep, wanted: Set[Tensor], *, sign: bool
    ) -> dict[Tensor, Tensor]:
        """Update of each wanted parameter from merged components: float32, with the shape of its shard."""
        updates = {
            tensor: torch.empty(local_tensor(tensor).shape, dtype=torch.float32, device=self._device)
            for tensor in self.parameters
            if tensor in wanted
        }
        for part, components in zip(self.plan.parts, merged, strict=True):
            total = components.values.sum()  # Not finite if any value is not.
            blocks = part.replicator.decode(components, part.batch_shape[1:], number)
            if sign:
                blocks = blocks.sign_().add_(total, alpha=0)  # As in signs().
            views = self._views_of(part, blocks, updates)
            if views:
                foreach.copy_([update for _, _, update in views], [source for _, source, _ in views])
        return updates

    def _views_of(
        self, part: MessagePart, batch: Tensor, locals_: Mapping[Tensor, Tensor]
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Triples: a parameter, views of a batch, and views of the same elements in ``locals_``."""
        return [
            (tensor, in_batch, in_local)
            for each in part.ranges
            if (tensor := self._all[each.number]) in locals_
            for in_batch, in_local in paired_views(part, each, batch, locals_[tensor])
        ]


def signs(values: Tensor) -> Tensor:
    """Signs 1, 0 and -1; NaN where ``values`` are not finite: with torch's 0 a training would stop unnoticed."""
    return values.sign().add_(values, alpha=0)


def pack(plan: BucketPlan, components: Sequence[Components]) -> Tensor:
    """Pack all indices and values into one message: (message_bytes,) uint8."""
    pieces: list[Tensor] = []
    for part, (values, indices) in zip(plan.parts, components, strict=True):
        numbers = [] if indices is None else [indices.to(part.index_dtype)]
        for each in (*numbers, values.to(plan.value_dtype)):
            piece = each.reshape(-1).view(torch.uint8)
            pieces += [piece, piece.new_zeros(padding(piece.numel()))]
    return torch.cat(pieces)


def unpack(plan: BucketPlan, message: Tensor) -> list[Components]:
    """Inverse of :func:`pack`."""
    rest = message

    def take(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        nonlocal rest
        num_bytes = shape[0] * shape[1] * dtype.itemsize
        own, rest = rest[:num_bytes], rest[num_bytes + padding(num_bytes) :]
        return own.view(dtype).view(shape)

    components: list[Components] = []
    for part in plan.parts:
        sends_indices = part.replicator.sends_indices
        indices = take(part.sent_shape, part.index_dtype).to(torch.int64) if sends_indices else None
        components.append(Components(take(part.sent_shape, plan.value_dtype).float(), indices))
    return components


def paired_views(part: MessagePart, span: BlockRange, batch: Tensor, local: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Equally shaped views of ``batch`` and ``local`` (row-major) that hold each element of ``local`` once."""
    rows, cols = span.rows, span.cols
    if len(part.block_shape) != 2:
        first = span.first * (part.block_numel if part.block_shape else 1)
        yield batch.view(-1)[first : first + rows * cols], local.view(-1)
        return
    (height, width), matrix = part.block_shape, local.view(rows, cols)
    own = batch[span.first : span.first + span.count].view(-(-rows // height), -(-cols // width), height, width)
    # The whole blocks, those at the right and lower edges, and the one in the corner.
    for down, row, tall in _bands(rows, height):
        for right, col, wide in _bands(cols, width):
            blocks = own[down, right, :tall, :wide].transpose(1, 2)
            yield blocks, matrix[row, col].unflatten(0, (-1, tall)).unflatten(2, (-1, wide))


def _bands(length: int, side: int) -> list[tuple[slice, slice, int]]:
    """The whole blocks of one dimension, and the shorter one after them: their numbers, elements, and side."""
    num_whole = length // side
    bands = [(slice(0, num_whole), slice(0, num_whole * side), side)] if num_whole else []
    if length % side:
        bands.append((slice(num_whole, None), slice(num_whole * side, None), length % side))
    return bands


def merge(components: Sequence[Components], rule: str, block_numel: int) -> Components:
    """Average over the nodes; the indices of all lie side by side, (num_blocks, R * num_sent), with each mean once.

    With ``rule="mean"`` sums are divided by the number of nodes; with ``"contributors"`` by the number of those that
    sent a value other than 0 for the coefficient (DeMo, Peng et al. 2024, arXiv:2411.19870). Nodes are added in order,
    so that every node gets the same bits on any device. If several nodes sent an index, the first one has the mean and
    the others have 0, so that a decoder may add them up in any order.
    """
    num_nodes = len(components)
    indices = [part.indices for part in components if part.indices is not None]
    if not indices:  # All nodes sent all coefficients.
        total = components[0].values.clone()
        for part in components[1:]:
            total.add_(part.values)
        return Components(total.div_(num_nodes), None)
    sent = torch.stack([part.values for part in components])
    means = torch.empty_like(sent)
    num_blocks = sent.size(1)
    size = max(1, _SUMMED_TOGETHER // block_numel) if sent.device.type == "cpu" else max(1, num_blocks)
    sums = sent.new_zeros(min(size, num_blocks), block_numel)
    for first in range(0, num_blocks, size):
        group = slice(first, first + size)
        of_group = [part[group] for part in indices]
        _sum(sums, of_group, sent[:, group], means[:, group])
        if rule == "mean":
            means[:, group].div_(num_nodes)
        else:
            num_contributors = (sent[:, group] != 0).float()
            _sum(sums, of_group, num_contributors, num_contributors)
            means[:, group].div_(num_contributors.clamp_min_(1))
    return Components(torch.cat(means.unbind(), 1), torch.cat(indices, 1))


def _sum(zeros: Tensor, indices: Sequence[Tensor], of_nodes: Tensor, out: Tensor) -> None:
    """Write the sum at each index to ``out`` for the first node that has it, else 0; ``out`` may be ``of_nodes``."""
    sums = zeros[: of_nodes.size(1)]  # Zeros again afterwards.
    for places, values in zip(indices, of_nodes, strict=True):
        # Not scatter_add_, whose order differs from run to run on CUDA.
        sums.scatter_(1, places, sums.gather(1, places).add_(values))
    for places, total in zip(indices, out, strict=True):
        torch.gather(sums, 1, places, out=total)
        sums.scatter_(1, places, 0.0)
