"""Replicators: they choose which components of their momenta nodes send each other, and decode them."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lightning_muon.config import check_number, check_whole, takes_options
from lightning_muon.math.dct import add_sparse_inverse_dct_, dct, groups

# How far rate * n may be from 1: decimals of thirds and sevenths are rounded.
_ROUNDED = 0.02
# Rows shorter than this many times the number that is chosen are not split: a round would cost more than it saves.
# 32 of 4096 take 24.7 ms of a core for 10 million elements; 28.2 ms with 2, and 27.3 ms if only the whole row is split.
_SPLIT_ABOVE = 4


@dataclass(frozen=True)
class ExchangeStep:
    """Identifies an exchange, equally on all nodes; a random or periodic choice depends on nothing else."""

    step: int  # Number of the exchange, from 0.
    bucket: int  # Number of the bucket in which the blocks are sent.


class Components(NamedTuple):
    """The values that are sent of each block."""

    values: Tensor  # (num_blocks, num_sent), float32.
    # (num_blocks, num_sent), int64: where in the flattened block (or its transform) each value belongs; `None` where it
    # follows from the ExchangeStep, so that only values are sent.
    indices: Tensor | None


class Replicator(ABC):
    """Base class of the ways to choose which components of their momenta nodes send each other.

    Subclasses are frozen dataclasses; a replicator has no state, does not communicate, and treats every block by
    itself. Momenta come as a batch (num_blocks, *block_shape), float32. All nodes call it with batches of equal shape.

    Attributes:
        sends_indices: Whether each node chooses its own indices. If so, all nodes get what all others sent
            (all-gather, which grows with the number of nodes); else the values are summed up on the way (all-reduce).
    """

    sends_indices: ClassVar[bool]

    def block_shape(self, rows: int, cols: int) -> tuple[int, ...]:
        """Shape of the blocks into which a matrix is cut, the last ones padded with zeros.

        ``()`` means no cut: all parameters of a bucket come together, flattened, as one block.
        """
        return ()

    @abstractmethod
    def num_sent(self, block_numel: int) -> int:
        """Number of values that are sent of a block of so many elements; at least 1 for a block that is not empty."""

    @abstractmethod
    def encode(self, blocks: Tensor, exchange: ExchangeStep) -> Components:
        """Choose what is sent of ``blocks`` (num_blocks, *block_shape), without changing them; local.

        No index occurs twice in a block.
        """

    @abstractmethod
    def decode(self, components: Components, block_shape: tuple[int, ...], exchange: ExchangeStep) -> Tensor:
        """Make blocks (num_blocks, *block_shape) from ``components``; linear in their values; local.

        Blocks may have more values than :meth:`num_sent`: those of several nodes. An index may then occur more than
        once, but at most one of its values is not 0; they are added in any order.
        """

    def subtract_(self, blocks: Tensor, components: Components, exchange: ExchangeStep) -> None:
        """Compute ``blocks -= decode(components)``; a replicator may override it with a faster way. Local."""
        blocks.sub_(self.decode(components, tuple(blocks.shape[1:]), exchange))


class LocalSteps:
    """Every node takes steps with its own gradients, of which nothing is sent to other nodes."""

    def bits_per_parameter(self) -> float:
        """Bits that a node sends for each parameter, on average over the steps."""
        return 0.0


@cache
def check_replicator(replicator: Replicator, block_shape: tuple[int, ...] = ()) -> None:
    """Raise unless two blocks (``()``: of a small matrix) are encoded and decoded as :class:`Replicator` says.

    The replicators of this file do. Trying them out when the package is imported would start the threads of OpenMP,
    without which a fork, as of Accelerate's ``notebook_launcher``, waits for ever.
    """
    if type(replicator).__module__ == __name__:
        return
    rows, cols = 48, 40
    shape = block_shape or replicator.block_shape(rows, cols) or (rows * cols,)
    numel, exchange = math.prod(shape), ExchangeStep(0, 0)
    blocks = torch.randn(2, *shape, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu")
    given = blocks.clone()

    def require(is_right: bool, problem: str) -> None:
        if not is_right:
            raise ValueError(f"{type(replicator).__name__}.{problem}")

    values, indices = sent = replicator.encode(blocks, exchange)
    num_sent = replicator.num_sent(numel)
    require(torch.equal(blocks, given), "encode changes the blocks that it is given")
    require(num_sent >= 1, f"num_sent({numel}) is {num_sent}: blocks of shape {shape} would never be trained")
    require(
        tuple(values.shape) == (2, num_sent),
        f"encode gives values of shape {tuple(values.shape)}; num_sent({numel}) says (2, {num_sent})",
    )
    require(
        (indices is None) != replicator.sends_indices,
        f"sends_indices is {replicator.sends_indices}, but encode gives {'no ' if indices is None else ''}indices",
    )
    if indices is not None:
        is_inside = indices.dtype == torch.int64 and bool(((indices >= 0) & (indices < numel)).all())
        require(is_inside, f"encode: indices are no int64 in [0, {numel})")
        steps = indices.sort(1).values.diff(dim=1)
        require(bool(steps.all()), "encode: an index occurs twice in a block; send the sum of its values once")
    decoded = replicator.decode(sent, shape, exchange)
    replicator.subtract_(blocks, sent, exchange)
    require(torch.allclose(blocks, given - decoded, atol=1e-4), "subtract_ takes off something else than decode gives")


def period(rate: float) -> int:
    """One of so many elements, or exchanges, is sent: ``round(1 / rate)``."""
    return max(1, round(1 / rate))


@dataclass(frozen=True)
class DCTTopK(Replicator):
    """Sends the ``top_k`` coefficients of the cosine transform of each block that are largest by absolute value.

    Source: Peng et al. 2024, arXiv:2411.19870, Algorithm 1. Bits per parameter and step of a node, with ``v`` bits for
    a value, where blocks are whole: ``top_k (16 + v) / block_numel``; 0.25 with 64 x 64 blocks, ``top_k=32``, bf16.

    Attributes:
        chunk_size: Longest side of a block. A shorter dimension is one block of its own length.
        top_k: Coefficients that are sent of a block; all if a block has fewer elements.
        strips: Cut the flattened shard into blocks of ``chunk_size`` elements, not matrices into squares
            (DeToNATION's convention): ``top_k (16 + v) / chunk_size`` bits.
    """

    chunk_size: int = 64
    top_k: int = 32
    strips: bool = False

    sends_indices: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole("DCTTopK: chunk_size", self.chunk_size, at_least=1)
        check_whole("DCTTopK: top_k", self.top_k, at_least=1)

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
        blocks = components.values.new_zeros((components.values.size(0), *block_shape))
        add_sparse_inverse_dct_(blocks, components.values, components.indices)
        return blocks

    @override
    def subtract_(self, blocks: Tensor, components: Components, exchange: ExchangeStep) -> None:
        assert components.indices is not None
        add_sparse_inverse_dct_(blocks, components.values, components.indices, alpha=-1)


def largest(rows: Tensor, count: int) -> Tensor:
    """Indices (num_rows, count) of the largest absolute values of each row, in no order; equal for equal rows."""
    # The bits of floats that are not negative have the order of the numbers, and integers are compared faster.
    magnitudes = rows.abs().view(torch.int32)
    # The largest are in the groups with the largest maxima. With groups of g elements, n / g maxima and count * g
    # elements are left to choose from; their sum is least for g = sqrt(n / count).
    num_rows, numel = magnitudes.shape
    size = 1  # Of a group: the largest power of 2, up to that g, that divides n.
    while numel > _SPLIT_ABOVE * count and numel % (2 * size) == 0 and (2 * size) ** 2 * count <= numel:
        size *= 2
    if size == 1:
        return torch.topk(magnitudes, count, dim=1, sorted=False).indices
    # The elements of a group are far apart, so that the maxima are taken of neighbours in memory.
    groups_chosen = largest(magnitudes.view(num_rows, size, -1).amax(1), count)
    firsts = torch.arange(0, numel, numel // size, device=magnitudes.device)[:, None]
    candidates = (groups_chosen[:, None] + firsts).flatten(1)
    winners = torch.topk(magnitudes.gather(1, candidates), count, dim=1, sorted=False).indices
    return candidates.gather(1, winners)


@dataclass(frozen=True)
class Full(Replicator):
    """Sends every element. Bits per parameter and step, with ``v`` bits for a value: ``v``."""

    sends_indices: ClassVar[bool] = False

    @override
    def num_sent(self, block_numel: int) -> int:
        return block_numel

    @override
    def encode(self, blocks: Tensor, exchange: ExchangeStep) -> Components:
        return Components(blocks.flatten(1), None)

    @override
    def decode(self, components: Components, block_shape: tuple[int, ...], exchange: ExchangeStep) -> Tensor:
        return components.values.view(components.values.size(0), *block_shape)


@dataclass(frozen=True)
class SharedElements(Replicator):
    """Sends one of ``n = round(1 / rate)`` elements in each step, the same ones on all nodes.

    So no indices are sent, and values are summed on the way. Bits per parameter and step, with ``v`` bits for a
    value: ``v / n``.
    """

    rate: float  # Part of the elements that is sent, in (0, 1].

    sends_indices: ClassVar[bool] = False

    def __post_init__(self) -> None:
        name, rate = type(self).__name__, self.rate
        check_number(f"{name}: rate", rate)
        if not 0 < rate <= 1:
            raise ValueError(f"{name}: rate must be in (0, 1], the part of the elements that is sent, got {rate}")
        if abs(rate * period(rate) - 1) > _ROUNDED:
            raise ValueError(
                f"{name}: rate must be 1 / n for a whole number n, since one of n elements is sent, got {rate}"
            )

    @abstractmethod
    def elements(self, exchange: ExchangeStep, block_numel: int, device: torch.device) -> Tensor:
        """Indices of the elements of a flattened block to send, 1-D; one less than :meth:`num_sent` is padded."""

    @override
    def num_sent(self, block_numel: int) -> int:
        return -(-block_numel // period(self.rate))

    @override
    def encode(self, blocks: Tensor, exchange: ExchangeStep) -> Components:
        flat = blocks.flatten(1)
        elements = self.elements(exchange, flat.size(1), flat.device)
        num_missing = self.num_sent(flat.size(1)) - elements.numel()
        return Components(F.pad(flat.index_select(1, elements), (0, num_missing)), None)

    @override
    def decode(self, components: Components, block_shape: tuple[int, ...], exchange: ExchangeStep) -> Tensor:
        values = components.values
        blocks = values.new_zeros((values.size(0), *block_shape))
        flat = blocks.view(values.size(0), math.prod(block_shape))
        elements = self.elements(exchange, flat.size(1), flat.device)
        flat.index_copy_(1, elements, values[:, : elements.numel()])
        return blocks


@dataclass(frozen=True)
class Random(SharedElements):
    """Sends one of each ``round(1 / rate)`` neighbours, drawn at random, alike on all nodes: no indices are sent.

    Values are summed on the way. Bits per parameter and step, with ``v`` bits for a value: ``v / round(1 / rate)``.

    Attributes:
        rate: Part of the elements that is sent, in (0, 1].
        seed: Seed of the draws; equal on all nodes.
    """

    seed: int = 0

    @override
    def elements(self, exchange: ExchangeStep, block_numel: int, device: torch.device) -> Tensor:
        cell = period(self.rate)
        key = hashlib.blake2b(f"{self.seed} {exchange.step} {exchange.bucket}".encode(), digest_size=8).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(key) >> 1)
        starts = torch.arange(0, block_numel, cell, device=device)
        drawn = torch.randint(cell, starts.shape, generator=generator, device=device)
        last_cell = block_numel - cell * (starts.numel() - 1)
        drawn[-1:] = torch.randint(last_cell, (1,), generator=generator, device=device)
        return starts.add_(drawn)


@dataclass(frozen=True)
class Striding(SharedElements):
    """Sends every ``n``-th element, ``n = round(1 / rate)``, from ``exchange.step mod n`` on."""

    @override
    def elements(self, exchange: ExchangeStep, block_numel: int, device: torch.device) -> Tensor:
        num_parts = period(self.rate)
        return torch.arange(min(exchange.step % num_parts, block_numel), block_numel, num_parts, device=device)


@dataclass(frozen=True)
class Slicing(SharedElements):
    """Sends the ``i``-th of ``n = round(1 / rate)`` equal slices of neighbours, ``i = exchange.step mod n``."""

    @override
    def elements(self, exchange: ExchangeStep, block_numel: int, device: torch.device) -> Tensor:
        num_parts = period(self.rate)
        index = exchange.step % num_parts
        first, stop = (number * block_numel // num_parts for number in (index, index + 1))
        return torch.arange(first, stop, device=device)


@dataclass(frozen=True)
class NoReplication(LocalSteps):
    """Sends nothing: each node applies its own momentum, and weights of nodes drift apart. 0 bits per parameter.

    It is the lower end of every comparison.
    """


@takes_options()
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

    Args:
        period: Steps from one average to the next.
        outer_lr: Learning rate of the outer step.
        outer_momentum: Momentum of the outer step, in [0, 1).
        nesterov: Nesterov's momentum, the paper's; it needs an ``outer_momentum`` above 0 to make a difference.
    """

    period: int
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        check_whole("DiLoCo: period", self.period, at_least=1)
        if not 0 < self.outer_lr < float("inf"):
            raise ValueError(f"DiLoCo: outer_lr must be positive, got {self.outer_lr}")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(f"DiLoCo: outer_momentum must be in [0, 1), got {self.outer_momentum}")

    @override
    def bits_per_parameter(self) -> float:
        return 32 / self.period
