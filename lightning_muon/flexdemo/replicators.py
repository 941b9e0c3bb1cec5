"""What nodes send each other of their momenta, and the two ways in which they send none."""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_muon.flexdemo.replicator import (
    Components,
    ExchangeStep,
    LocalSteps,
    Replicator,
    period,
    require_count,
    require_rate,
)
from lightning_muon.math.dct import dct, groups, sparse_inverse_dct, subtract_sparse_inverse_dct_

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

    sends_indices: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_count(self, "chunk_size")
        require_count(self, "top_k")

    @override
    def block_shape(self, rows: int, cols: int) -> tuple[int, ...]:
        if self.strips:
            return (self.chunk_size,)
        return (min(self.chunk_size, rows), min(self.chunk_size, cols))

    @override
    def num_sent(self, block_numel: int) -> int:
        return min(self.top_k, block_numel)

    @override
    def encode(self, blocks: Tensor, exchange: ExchangeStep) -> Components:
        """The largest coefficients, in no order, and their indices in the flattened transform."""
        num_sent = self.num_sent(math.prod(blocks.shape[1:]))
        values = blocks.new_empty((blocks.size(0), num_sent))
        indices = torch.empty_like(values, dtype=torch.int64)
        for group in groups(blocks):
            coefficients = dct(blocks[group]).flatten(1)
            indices[group] = largest(coefficients, num_sent)
            torch.gather(coefficients, 1, indices[group], out=values[group])
        return Components(values, indices)

    @override
    def decode(self, components: Components, block_shape: tuple[int, ...], exchange: ExchangeStep) -> Tensor:
        assert components.indices is not None
        return sparse_inverse_dct(components.values, components.indices, block_shape)

    @override
    def subtract_(self, blocks: Tensor, components: Components, exchange: ExchangeStep) -> None:
        assert components.indices is not None
        subtract_sparse_inverse_dct_(blocks, components.values, components.indices)


def largest(rows: Tensor, count: int) -> Tensor:
    """Indices (num_rows, count) of the largest absolute values of each row, in no order; equal for equal rows."""
    # The bits of floats that are not negative have the order of the numbers, and integers are compared faster.
    return _largest(rows.abs().view(torch.int32), count)


def _largest(magnitudes: Tensor, count: int) -> Tensor:
    """Indices (num_rows, count) of the largest of each row.

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


@dataclass(frozen=True)
class Full(Replicator):
    """Every element. Bits per parameter and step, with ``v`` bits for a value: ``v``."""

    sends_indices: ClassVar[bool] = False

    @override
    def num_sent(self, block_numel: int) -> int:
        return block_numel

    @override
    def encode(self, blocks: Tensor, exchange: ExchangeStep) -> Components:
        """A copy: ``blocks`` may change before the values are sent."""
        return Components(blocks.flatten(1).clone(), None)

    @override
    def decode(self, components: Components, block_shape: tuple[int, ...], exchange: ExchangeStep) -> Tensor:
        """A view of the values."""
        return components.values.view(components.values.size(0), *block_shape)


@dataclass(frozen=True)
class Random(Replicator):
    """One of each ``round(1 / rate)`` neighbours, drawn at random; all nodes draw the same, so no indices travel.

    Values are summed up on the way. Bits per parameter and step, with ``v`` bits for a value: ``v / round(1 / rate)``.

    Attributes:
        rate: Part of the elements that is sent, in (0, 1].
        seed: Of the draws; equal on all nodes.
    """

    rate: float
    seed: int = 0

    sends_indices: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_rate(self, self.rate)

    @override
    def num_sent(self, block_numel: int) -> int:
        """One for each cell, the last of which may be short."""
        return -(-block_numel // period(self.rate))

    @override
    def encode(self, blocks: Tensor, exchange: ExchangeStep) -> Components:
        """The elements drawn, in their order."""
        flat = blocks.flatten(1)
        return Components(flat.index_select(1, self._indices(flat.size(1), exchange, flat.device)), None)

    @override
    def decode(self, components: Components, block_shape: tuple[int, ...], exchange: ExchangeStep) -> Tensor:
        """Zeros everywhere else."""
        values = components.values
        blocks = values.new_zeros((values.size(0), *block_shape))
        flat = blocks.flatten(1)
        flat.index_copy_(1, self._indices(flat.size(1), exchange, flat.device), values)
        return blocks

    def _indices(self, block_numel: int, exchange: ExchangeStep, device: torch.device) -> Tensor:
        """(num_sent,): one element of each cell."""
        cell = period(self.rate)
        key = hashlib.blake2b(f"{self.seed} {exchange.step} {exchange.part}".encode(), digest_size=8).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(key) >> 1)
        starts = torch.arange(0, block_numel, cell, device=device)
        drawn = torch.randint(cell, starts.shape, generator=generator, device=device)
        last_cell = block_numel - cell * (starts.numel() - 1)
        drawn[-1:] = torch.randint(last_cell, (1,), generator=generator, device=device)
        return starts.add_(drawn)


@dataclass(frozen=True)
class PeriodicReplicator(Replicator):
    """In each step one of ``n = round(1 / rate)`` parts of the elements, which has the same number on all nodes.

    So no indices travel, and values are summed up on the way. Bits per parameter and step, with ``v`` bits for a
    value: ``v / n``.
    """

    rate: float  # Part of the elements that is sent, in (0, 1].

    sends_indices: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_rate(self, self.rate)

    @abstractmethod
    def elements(self, index: int, num_parts: int, block_numel: int) -> slice:
        """Which elements of a flattened block are the part ``index``."""

    @override
    def num_sent(self, block_numel: int) -> int:
        """The largest part; one that has an element less sends a zero at the end."""
        return -(-block_numel // period(self.rate))

    @override
    def encode(self, blocks: Tensor, exchange: ExchangeStep) -> Components:
        """The elements of this exchange, in their order."""
        flat = blocks.flatten(1)
        taken = flat[:, self._elements_of(exchange, flat.size(1))]
        values = flat.new_zeros((flat.size(0), self.num_sent(flat.size(1))))
        values[:, : taken.size(1)] = taken
        return Components(values, None)

    @override
    def decode(self, components: Components, block_shape: tuple[int, ...], exchange: ExchangeStep) -> Tensor:
        """Zeros everywhere else."""
        values = components.values
        blocks = values.new_zeros((values.size(0), *block_shape))
        flat = blocks.flatten(1)
        taken = flat[:, self._elements_of(exchange, flat.size(1))]
        taken.copy_(values[:, : taken.size(1)])
        return blocks

    def _elements_of(self, exchange: ExchangeStep, block_numel: int) -> slice:
        num_parts = period(self.rate)
        return self.elements(exchange.step % num_parts, num_parts, block_numel)


@dataclass(frozen=True)
class Striding(PeriodicReplicator):
    """Every ``n``-th element, ``n = round(1 / rate)``, from ``exchange.step mod n`` on."""

    @override
    def elements(self, index: int, num_parts: int, block_numel: int) -> slice:
        return slice(index, block_numel, num_parts)


@dataclass(frozen=True)
class Slicing(PeriodicReplicator):
    """The ``i``-th of ``n = round(1 / rate)`` equal slices of neighbours, ``i = exchange.step mod n``."""

    @override
    def elements(self, index: int, num_parts: int, block_numel: int) -> slice:
        return slice(index * block_numel // num_parts, (index + 1) * block_numel // num_parts)


@dataclass(frozen=True)
class NoReplication(LocalSteps):
    """Nothing travels, each node applies its own momentum, and weights of nodes drift apart. 0 bits per parameter.

    The lower end of every comparison.
    """

    @override
    def bits_per_parameter(self) -> float:
        return 0.0


@dataclass(frozen=True, kw_only=True)
class DiLoCo(LocalSteps):
    """Nodes train by themselves and average what they moved every ``period`` steps (Douillard et al. 2023).

    With the weights ``w`` of the last average and ``w_r`` of node r after ``period`` steps, the outer gradient is
    ``g = mean_r (w - w_r)``, and all nodes go on from ``w`` after one step of SGD with ``g``: ``u <- outer_momentum * u
    + g``, ``w <- w - outer_lr * (outer_momentum * u + g)`` (with ``nesterov``; else ``w - outer_lr * u``).
    ``outer_lr=1, outer_momentum=0`` is the plain mean of the parameters, LocalSGD. Bits per parameter and step, in
    float32: ``32 / period``.

    Source: arXiv:2311.08105, Algorithm 1 and section 3 (Nesterov, learning rate 0.7, momentum 0.9); with Muon as the
    inner optimizer MuLoCo, arXiv:2505.23725.

    Attributes:
        period: Steps from one average to the next.
        outer_lr: Learning rate of the outer step.
        outer_momentum: Momentum of the outer step, in [0, 1).
        nesterov: Nesterov's momentum, the paper's; it needs an ``outer_momentum`` above 0 to make a difference.
        overlap: Let the mean travel during the following steps and apply it one period late.
    """

    period: int
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True
    overlap: bool = False

    def __post_init__(self) -> None:
        require_count(self, "period")
        if not 0 < self.outer_lr < float("inf"):
            raise ValueError(f"DiLoCo: outer_lr must be positive, got {self.outer_lr}")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(f"DiLoCo: outer_momentum must be in [0, 1), got {self.outer_momentum}")

    @override
    def bits_per_parameter(self) -> float:
        return 32 / self.period
