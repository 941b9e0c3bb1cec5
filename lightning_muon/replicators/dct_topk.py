"""The largest cosine coefficients of each block."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_muon.math.dct import dct, groups, sparse_inverse_dct, subtract_sparse_inverse_dct_
from lightning_muon.replicators.checks import require_count
from lightning_muon.replicators.replicator import Components, Replicator, Turn

# Rows shorter than this many times the number that is chosen are split no more: a round would cost more than it saves.
# 32 of 4096 take 24.7 ms of a core for 10 million elements; 28.2 ms with 2, and 27.3 ms if only the whole row is split.
_SPLIT_ABOVE = 4


@dataclass(frozen=True)
class DCTTopK(Replicator):
    """Of each block the ``top_k`` coefficients of the cosine transform that are largest by absolute value.

    Source: Peng et al. 2024, arXiv:2411.19870, Algorithm 1. Bits per parameter and step of a node, with ``v`` bits for
    a value, where blocks are whole: ``top_k (16 + v) / block_numel``; 0.25 with 64 x 64 blocks, ``top_k=32``, bf16.

    Attributes:
        chunk_size: Longest side of a block. A shorter dimension is one block of its own length.
        top_k: Coefficients that are sent of a block; of a block with fewer elements all.
        strips: Cut the flattened shard into blocks of ``chunk_size`` elements, not matrices into squares
            (DeToNATION's convention): ``top_k (16 + v) / chunk_size`` bits.
    """

    chunk_size: int = 64
    top_k: int = 32
    strips: bool = False

    sends_positions: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the sizes."""
        require_count(self, "chunk_size")
        require_count(self, "top_k")

    def block_shape(self, rows: int, cols: int) -> tuple[int, ...]:
        """At most ``chunk_size`` each way."""
        if self.strips:
            return (self.chunk_size,)
        return (min(self.chunk_size, rows), min(self.chunk_size, cols))

    def num_sent(self, block_numel: int) -> int:
        """``top_k``, or all."""
        return min(self.top_k, block_numel)

    def encode(self, blocks: Tensor, turn: Turn) -> Components:
        """The largest coefficients, in no order, and their positions in the flattened transform."""
        del turn
        num_sent = self.num_sent(math.prod(blocks.shape[1:]))
        values = blocks.new_empty((blocks.size(0), num_sent))
        positions = torch.empty_like(values, dtype=torch.int64)
        for group in groups(blocks):
            coefficients = dct(blocks[group]).flatten(1)
            positions[group] = largest(coefficients, num_sent)
            torch.gather(coefficients, 1, positions[group], out=values[group])
        return Components(values, positions)

    def decode(self, components: Components, block_shape: tuple[int, ...], turn: Turn) -> Tensor:
        """The inverse transform."""
        del turn
        assert components.positions is not None
        return sparse_inverse_dct(components.values, components.positions, block_shape)

    def subtract_(self, blocks: Tensor, components: Components, turn: Turn) -> None:
        """Without blocks in between."""
        del turn
        assert components.positions is not None
        subtract_sparse_inverse_dct_(blocks, components.values, components.positions)


def largest(rows: Tensor, count: int) -> Tensor:
    """Positions (num_rows, count) of the largest absolute values of each row, in no order; equal for equal rows."""
    return _largest(rows.abs(), count)


def _largest(magnitudes: Tensor, count: int) -> Tensor:
    """As :func:`largest`, of values that are not negative.

    A row is split into groups, and what is in none of the ``count`` groups with the largest maxima is no larger than
    any of these maxima. With groups of g elements, ``n / g`` maxima and ``count g`` elements are left to choose from,
    least for ``g = sqrt(n / count)``; the maxima of many groups are chosen from in the same way.
    """
    num_rows, numel = magnitudes.shape
    size = _group_size(numel, count) if numel > _SPLIT_ABOVE * count else 1
    if size == 1:
        return torch.topk(magnitudes, count, dim=1, sorted=False).indices
    # The elements of a group are far apart, so that the maxima are taken of neighbours in memory.
    groups_chosen = _largest(magnitudes.view(num_rows, size, -1).amax(1), count)
    firsts = torch.arange(0, numel, numel // size, device=magnitudes.device)[:, None]
    candidates = (groups_chosen[:, None] + firsts).flatten(1)
    winners = torch.topk(magnitudes.gather(1, candidates), count, dim=1, sorted=False).indices
    return candidates.gather(1, winners)


def _group_size(numel: int, count: int) -> int:
    """The largest power of 2 up to ``sqrt(numel / count)`` that divides ``numel``."""
    size = 1
    while numel % (2 * size) == 0 and (2 * size) ** 2 * count <= numel:
        size *= 2
    return size
