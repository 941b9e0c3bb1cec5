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
from lightning_muon.flexdemo.wire import SCALED_TOGETHER, VALUE_FORMATS, ValueFormat, index_dtype

ALIGNMENT = 8


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in its part."""

    number: int  # Number of the parameter, in the order of the model.
    rows: int  # Rows of its local shard, read as a matrix.
    cols: int  # Columns of it.
    first: int  # First block, or first element where there are no blocks.
    count: int  # Number of blocks, or of elements.


@dataclass(frozen=True)
class MessagePart:
    """Blocks of one shape that are encoded as one batch."""

    replicator: Replicator  # Encodes them.
    values: ValueFormat  # Format of the values.
    block_shape: tuple[int, ...]  # `()` if the part is one block of `block_numel` elements.
    num_blocks: int  # In this part.
    block_numel: int  # Elements of a block, padding included.
    places: tuple[Place, ...]  # The parameters.

    @property
    def num_sent(self) -> int:
        """Values sent per block."""
        return self.replicator.num_sent(self.block_numel)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of the batch that the replicator gets: (num_blocks, *block_shape)."""
        return (self.num_blocks, *(self.block_shape or (self.block_numel,)))

    def segment(self, node: int, num_nodes: int) -> slice:
        """The values that ``node`` adds up; the slice begins where a scale of the value format begins."""
        numel = self.num_blocks * self.num_sent
        length = -(-numel // (num_nodes * SCALED_TOGETHER)) * SCALED_TOGETHER
        return slice(min(node * length, numel), min((node + 1) * length, numel))

    def wire_shape(self, node: int = 0, num_nodes: int = 1) -> tuple[int, int]:
        """Rows and columns of values that the format gets: blocks, or one row that can be cut without indices."""
        if self.replicator.sends_indices:
            return self.num_blocks, self.num_sent
        segment = self.segment(node, num_nodes)
        return 1, segment.stop - segment.start

    @property
    def index_bytes(self) -> int:
        """Bytes of all indices that are sent."""
        itemsize = index_dtype(self.block_numel).itemsize if self.replicator.sends_indices else 0
        return self.num_blocks * self.num_sent * itemsize

    def message_bytes(self, node: int = 0, num_nodes: int = 1) -> int:
        """Bytes of all indices and of the values of a segment, each padded to a multiple of 8."""
        value_bytes = self.values.num_bytes(*self.wire_shape(node, num_nodes))
        return sum(-(-num_bytes // ALIGNMENT) * ALIGNMENT for num_bytes in (self.index_bytes, value_bytes))


@dataclass(frozen=True)
class BucketPlan:
    """The parts of the message of one rank for some parameters."""

    members: tuple[int, ...]  # Numbers of the parameters, in the order in which backward finishes them.
    parts: tuple[MessagePart, ...]  # Without those that are empty on this rank.

    def message_bytes(self, node: int = 0, num_nodes: int = 1) -> int:
        """Bytes of the message with the values that ``node`` adds up; by default with all indices and values."""
        return sum(part.message_bytes(node, num_nodes) for part in self.parts)

    def is_summed(self, num_nodes: int) -> bool:
        """Whether nodes send each other segments of the values, and then sums of them, instead of whole messages.

        With two nodes a whole message costs the same bytes, and one wait instead of two.
        """
        return num_nodes > 2 and bool(self.parts) and not any(part.replicator.sends_indices for part in self.parts)

    @property
    def returned_dtype(self) -> torch.dtype:
        """Dtype in which sums are sent."""
        is_exact = all(part.values is VALUE_FORMATS["fp32"] for part in self.parts)
        return torch.float32 if is_exact else torch.bfloat16

    def segment_lengths(self, node: int, num_nodes: int) -> list[int]:
        """Number of values that ``node`` adds up, for each part; there are no indices."""
        return [part.wire_shape(node, num_nodes)[1] for part in self.parts]

    def sent_bytes(self, node: int, num_nodes: int) -> int:
        """Bytes that a rank sends to other nodes: R - 1 messages, or 2 (R - 1) / R where values are summed up."""
        if not self.is_summed(num_nodes):
            return (num_nodes - 1) * self.message_bytes()
        there = sum(self.message_bytes(other, num_nodes) for other in range(num_nodes) if other != node)
        back = self.returned_dtype.itemsize * sum(self.segment_lengths(node, num_nodes))
        return there + (num_nodes - 1) * back


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
            room = config.chunk_bytes
        buckets[-1].append(number)
        room -= num_bytes
    values = VALUE_FORMATS[config.value_format]
    dense_values = VALUE_FORMATS["fp32" if config.value_format == "fp32" else "bf16"]
    plans: list[BucketPlan] = []
    for members in buckets:
        dense = [number for number in members if shapes[number].is_dense(config.dense_below)]
        compressed = [number for number in members if number not in dense]
        parts = _parts(compressed, shapes, replicator, values) + _parts(dense, shapes, Full(), dense_values)
        plans.append(BucketPlan(tuple(members), tuple(parts)))
    return plans


def _parts(
    members: Sequence[int], shapes: Sequence[Shape], replicator: Replicator, values: ValueFormat
) -> list[MessagePart]:
    """The parts for parameters of one kind, without those that have no elements on this rank."""
    by_shape: dict[tuple[int, ...], list[Place]] = {}
    for number in members:
        rows, cols = shapes[number].as_matrix()
        if rows * cols == 0:
            continue
        block_shape = replicator.block_shape(rows, cols)
        count = math.ceil(rows * cols / math.prod(block_shape))
        if len(block_shape) == 2:
            count = math.ceil(rows / block_shape[0]) * math.ceil(cols / block_shape[1])
        places = by_shape.setdefault(block_shape, [])
        first = places[-1].first + places[-1].count if places else 0
        places.append(Place(number, rows, cols, first, count))
    parts: list[MessagePart] = []
    for block_shape, places in by_shape.items():
        total = places[-1].first + places[-1].count
        num_blocks, block_numel = (total, math.prod(block_shape)) if block_shape else (1, total)
        parts.append(MessagePart(replicator, values, block_shape, num_blocks, block_numel, tuple(places)))
    return parts
