"""Which parameters are sent together, and where each of them lies in a message; numbers only.

A message of a rank has parts: batches of blocks of one shape each, and at last the parameters that are sent dense. A
part is its indices, if the replicator sends any, and its values, both beginning at multiples of 8 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.replicators import Full, Replicator

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
