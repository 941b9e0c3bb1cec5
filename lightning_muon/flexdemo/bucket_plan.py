"""Which parameters travel together, and where each of them lies in a message; numbers only.

A message of a rank has parts: a batch of blocks of one shape each, and at last the parameters that travel dense. A part
is its indices, where the replicator sends any, and its values, both beginning at multiples of 8 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_muon.flexdemo.replicator import Replicator
from lightning_muon.flexdemo.replicators import Full
from lightning_muon.flexdemo.wire import SCALED_TOGETHER, ValueFormat, index_bytes, value_format
from lightning_muon.params.layout import local_tensor

_ALIGNMENT = 8


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in its part."""

    number: int  # Of the parameter in its bucket.
    rows: int  # Of its local shard, read as a matrix.
    cols: int  # As `rows`.
    first: int  # First block, or first element where blocks are not cut.
    count: int  # Blocks, or elements.


@dataclass(frozen=True)
class Part:
    """Blocks of one shape that are encoded as one batch."""

    replicator: Replicator  # Encodes them.
    values: ValueFormat  # Format of the values.
    block_shape: tuple[int, ...]  # `()` where all is one block of `numel` elements.
    num_blocks: int  # In this part.
    block_numel: int  # Elements of a block, padding included.
    places: tuple[Place, ...]  # The parameters.

    @property
    def num_sent(self) -> int:
        """Values that are sent of each block."""
        return self.replicator.num_sent(self.block_numel)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """What the replicator gets: (num_blocks, *block_shape)."""
        return (self.num_blocks, *(self.block_shape or (self.block_numel,)))

    @property
    def has_padding(self) -> bool:
        """Whether the batch has elements that belong to no parameter."""
        return self.num_blocks * self.block_numel != sum(place.rows * place.cols for place in self.places)

    @property
    def index_bytes(self) -> int:
        """Of all indices."""
        if not self.replicator.sends_indices:
            return 0
        return self.num_blocks * self.num_sent * index_bytes(self.block_numel)

    @property
    def wire_shape(self) -> tuple[int, int]:
        """The values, to their format. Those that may be added up on the way are one row, which can be cut anywhere."""
        if self.replicator.sends_indices:
            return self.num_blocks, self.num_sent
        return 1, self.num_blocks * self.num_sent

    @property
    def value_bytes(self) -> int:
        """Of all values."""
        return self.values.num_bytes(*self.wire_shape)


@dataclass(frozen=True)
class BucketPlan:
    """The parts of the message of one rank for some parameters."""

    members: tuple[int, ...]  # Numbers of the parameters, in the order in which backward finishes them.
    parts: tuple[Part, ...]  # Without those that are empty on this rank.


@dataclass(frozen=True)
class Shape:
    """A parameter, to the planner: its global shape and the shape of the shard of the calling rank."""

    whole: tuple[int, ...]
    local: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of all shards."""
        return math.prod(self.whole)


def shapes_of(parameters: Sequence[Tensor]) -> list[Shape]:
    """Global and local shapes of parameters."""
    return [Shape(tuple(tensor.shape), tuple(local_tensor(tensor).shape)) for tensor in parameters]


def matrix_view(shape: Shape) -> tuple[int, int]:
    """Rows and columns of the shard, read as a matrix in row-major order.

    More than two dimensions are divided into the leading and the rest where the matrix comes nearest to a square: a
    convolution of 256 x 128 x 3 x 3 becomes 256 x 1152, a stack of 8 x 512 x 2048 becomes 4096 x 2048.
    """
    splits = range(1, max(2, len(shape.whole)))
    best = min(splits, key=lambda dim: _elongation(math.prod(shape.whole[:dim]), math.prod(shape.whole[dim:])))
    return math.prod(shape.local[:best]), math.prod(shape.local[best:])


def _elongation(rows: int, cols: int) -> float:
    return max(rows, cols) / max(1, min(rows, cols))


def plan_buckets(
    shapes: Sequence[Shape], *, replicator: Replicator, value_format_name: str, dense_below: int, chunk_bytes: int
) -> list[BucketPlan]:
    """Buckets for parameters of these shapes; which are together depends on global shapes only.

    Args:
        shapes: In the order of the model; backward finishes the last one first.
        replicator: Of what does not travel dense.
        value_format_name: Of its values.
        dense_below: As in :class:`~lightning_muon.flexdemo.config.FlexDeMoConfig`.
        chunk_bytes: As there.
    """
    buckets: list[list[int]] = []
    room = 0
    for number in reversed(range(len(shapes))):
        num_bytes = 4 * shapes[number].numel
        if not buckets or num_bytes > room:
            buckets.append([])
            room = chunk_bytes
        buckets[-1].append(number)
        room -= num_bytes
    values = value_format(value_format_name)
    dense_values = value_format("fp32" if value_format_name == "fp32" else "bf16")
    return [
        BucketPlan(
            tuple(members),
            (
                *_parts([n for n in members if not is_dense(shapes[n], dense_below)], shapes, replicator, values),
                *_parts([n for n in members if is_dense(shapes[n], dense_below)], shapes, Full(), dense_values),
            ),
        )
        for members in buckets
    ]


def is_dense(shape: Shape, dense_below: int) -> bool:
    """Whether a parameter travels whole."""
    return len(shape.whole) < 2 or shape.numel < dense_below


def _parts(members: Sequence[int], shapes: Sequence[Shape], replicator: Replicator, values: ValueFormat) -> list[Part]:
    """The parts for parameters of one kind; a parameter without elements here is in none."""
    by_shape: dict[tuple[int, ...], list[Place]] = {}
    filled: dict[tuple[int, ...], int] = {}
    for number in members:
        rows, cols = matrix_view(shapes[number])
        if rows * cols == 0:
            continue
        block_shape = replicator.block_shape(rows, cols)
        count = num_blocks(block_shape, rows, cols) if block_shape else rows * cols
        first = filled.get(block_shape, 0)
        by_shape.setdefault(block_shape, []).append(Place(number, rows, cols, first, count))
        filled[block_shape] = first + count
    return [
        Part(
            replicator,
            values,
            block_shape,
            filled[block_shape] if block_shape else 1,
            math.prod(block_shape) if block_shape else filled[block_shape],
            tuple(places),
        )
        for block_shape, places in by_shape.items()
    ]


def aligned(num_bytes: int) -> int:
    """The next multiple of 8."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def message_bytes(plan: BucketPlan) -> int:
    """Bytes of what one rank sends to another one if all indices and values of a bucket travel in one message."""
    return sum(aligned(part.index_bytes) + aligned(part.value_bytes) for part in plan.parts)


def is_summed(plan: BucketPlan, num_nodes: int) -> bool:
    """Whether nodes send each other segments of the values and then sums of them, not whole messages.

    With two nodes a whole message costs the same bytes, and half of the waiting.
    """
    return num_nodes > 2 and not any(part.replicator.sends_indices for part in plan.parts)


def segment(part: Part, node: int, num_nodes: int) -> tuple[int, int]:
    """Range of the values of a part that a node adds up; begins where a scale of the value format begins."""
    numel = part.num_blocks * part.num_sent
    length = -(-numel // (num_nodes * SCALED_TOGETHER)) * SCALED_TOGETHER
    return min(node * length, numel), min((node + 1) * length, numel)


def segment_bytes(plan: BucketPlan, node: int, num_nodes: int) -> int:
    """Bytes of what a rank sends to a node, of the values that this node adds up."""
    lengths = [stop - start for start, stop in (segment(part, node, num_nodes) for part in plan.parts)]
    return sum(
        aligned(part.values.num_bytes(1, length)) for part, length in zip(plan.parts, lengths, strict=True) if length
    )


def sum_bytes(plan: BucketPlan, node: int, num_nodes: int) -> int:
    """Bytes of the sums that a node sends to each other one."""
    itemsize = returned_dtype(plan).itemsize
    return itemsize * sum(stop - start for start, stop in (segment(part, node, num_nodes) for part in plan.parts))


def returned_dtype(plan: BucketPlan) -> torch.dtype:
    """In which sums travel."""
    is_exact = all(part.values is value_format("fp32") for part in plan.parts)
    return torch.float32 if is_exact else torch.bfloat16


def sent_bytes(plan: BucketPlan, node: int, num_nodes: int) -> int:
    """Bytes that a rank of a node sends to other nodes in a step for this bucket.

    Where nodes choose their own indices, the message goes to each of the others: (R - 1) messages. Else the
    values are summed up as in a ring all-reduce, 2 (R - 1) / R messages: each node gets a segment of them from all
    others, and sends the sum to all others.
    """
    if not is_summed(plan, num_nodes):
        return (num_nodes - 1) * message_bytes(plan)
    others = [other for other in range(num_nodes) if other != node]
    return sum(segment_bytes(plan, other, num_nodes) for other in others) + len(others) * sum_bytes(
        plan, node, num_nodes
    )


def num_blocks(block_shape: tuple[int, ...], rows: int, cols: int) -> int:
    """Blocks of a ``rows x cols`` matrix: by both sides, by the flattened matrix, or for ``()`` one."""
    if len(block_shape) == 2:
        return math.ceil(rows / block_shape[0]) * math.ceil(cols / block_shape[1])
    return math.ceil(rows * cols / block_shape[0]) if block_shape else 1
