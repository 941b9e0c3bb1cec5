"""The interface of a replicator: momentum -> components that are sent -> what of the momentum they stand for."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

# How far rate * n may be from 1: decimals of thirds and sevenths are rounded.
_ROUNDED = 0.02


@dataclass(frozen=True)
class ExchangeStep:
    """Which exchange it is, equal on all nodes: a random or periodic choice depends on nothing else.

    Attributes:
        step: Number of the exchange, from 0.
        part: Number of the bucket in which the blocks travel.
    """

    step: int
    part: int


class Components(NamedTuple):
    """What is sent of each block.

    Attributes:
        values: (num_blocks, num_sent), float32.
        indices: (num_blocks, num_sent), int64: where in the flattened block (or its transform) each value belongs;
            ``None`` where it follows from the :class:`ExchangeStep`, so that nothing but values travels.
    """

    values: Tensor
    indices: Tensor | None

    @property
    def positions(self) -> Tensor | None:
        """Another name of ``indices``."""
        return self.indices


class Replicator(ABC):
    """One way to choose what nodes send each other of their momenta.

    Frozen dataclasses; a replicator has no state and does not communicate, and treats every block by itself. Momenta
    come as a batch (num_blocks, *block_shape), float32. All nodes call it with batches of equal shape.

    Attributes:
        sends_indices: Whether each node chooses its own indices. If so, all nodes get what all others sent
            (all-gather, which grows with the number of nodes); else the values are summed up on the way (all-reduce).
    """

    sends_indices: ClassVar[bool]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "sends_positions" in vars(cls):
            warnings.warn(f"{cls.__name__}.sends_positions is called sends_indices now", FutureWarning, stacklevel=2)
            cls.sends_indices = vars(cls)["sends_positions"]

    def block_shape(self, rows: int, cols: int) -> tuple[int, ...]:
        """Shape of the blocks into which a matrix is cut, the last ones padded with zeros.

        ``()``: not cut at all; then all parameters of a bucket come together, flattened, as one block.
        """
        del rows, cols
        return ()

    @abstractmethod
    def num_sent(self, block_numel: int) -> int:
        """Values that are sent of a block of so many elements; at least 1 for a block that is not empty."""

    @abstractmethod
    def encode(self, blocks: Tensor, exchange: ExchangeStep) -> Components:
        """What is sent of ``blocks`` (num_blocks, *block_shape), which it does not change; local.

        No index occurs twice in a block.
        """

    @abstractmethod
    def decode(self, components: Components, block_shape: tuple[int, ...], exchange: ExchangeStep) -> Tensor:
        """The blocks (num_blocks, *block_shape) for which ``components`` stand; linear in their values; local.

        There may be other numbers of values for each block than :meth:`num_sent`: those of several nodes. The same
        index may then occur more than once, but at most one of its values is not 0; they add up, in any order.
        """

    def subtract_(self, blocks: Tensor, components: Components, exchange: ExchangeStep) -> None:
        """``blocks -= decode(components)``; for a replicator that can do it faster. Local."""
        blocks.sub_(self.decode(components, tuple(blocks.shape[1:]), exchange))


class LocalSteps(ABC):
    """Every node applies its own momentum; no part of a step travels. Frozen dataclasses, no state.

    Not a :class:`Replicator`: there is nothing to encode.
    """

    @abstractmethod
    def bits_per_parameter(self) -> float:
        """Bits that a node sends for each parameter, on average over the steps."""


def check_replicator(replicator: Replicator, block_shape: tuple[int, ...] = ()) -> None:
    """Raise unless the replicator does with two blocks what :class:`Replicator` says of shapes, dtypes and indices.

    Args:
        replicator: To try.
        block_shape: Of the blocks; ``()`` for those of a small matrix.
    """
    rows, cols = 48, 40
    shape = block_shape or replicator.block_shape(rows, cols) or (rows * cols,)
    name, numel, exchange = type(replicator).__name__, math.prod(shape), ExchangeStep(0, 0)
    blocks = torch.randn(2, *shape, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu")
    given = blocks.clone()
    values, indices = sent = replicator.encode(blocks, exchange)
    _require(torch.equal(blocks, given), f"{name}.encode changes the blocks that it is given")
    num_sent = replicator.num_sent(numel)
    _require(num_sent >= 1, f"{name}.num_sent({numel}) is {num_sent}: blocks of shape {shape} would never be trained")
    _require(
        tuple(values.shape) == (2, num_sent),
        f"{name}.encode gives values of shape {tuple(values.shape)} for (2, {', '.join(map(str, shape))}) blocks; "
        f"num_sent({numel}) says (2, {num_sent})",
    )
    _require(values.dtype == torch.float32, f"{name}.encode gives values of {values.dtype}, not float32")
    _require(
        (indices is not None) == replicator.sends_indices,
        f"{name}.sends_indices is {replicator.sends_indices}, but encode gives indices "
        f"{None if indices is None else tuple(indices.shape)}",
    )
    if indices is not None:
        inside = bool(((indices >= 0) & (indices < numel)).all()) and indices.dtype == torch.int64
        _require(inside, f"{name}.encode: indices are no int64 in [0, {numel})")
        _require(
            bool((indices.sort(1).values.diff(dim=1) > 0).all()),
            f"{name}.encode: an index occurs twice in a block; send the sum of its values once",
        )
    decoded = replicator.decode(sent, shape, exchange)
    _require(decoded.shape == blocks.shape, f"{name}.decode gives {tuple(decoded.shape)}, not {tuple(blocks.shape)}")
    replicator.subtract_(blocks, sent, exchange)
    _require(
        torch.allclose(blocks, given - decoded, atol=1e-4),
        f"{name}.subtract_ takes off something else than decode gives",
    )


def _require(is_right: bool, message: str) -> None:
    if not is_right:
        raise ValueError(message)


def require_count(options: object, name: str) -> None:
    """Raise unless the option is a whole number of at least 1."""
    value = getattr(options, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{type(options).__name__}: {name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{type(options).__name__}: {name} must be at least 1, got {value}")


def require_rate(options: object, rate: object) -> None:
    """Raise unless ``rate`` is a part of the elements, in (0, 1]."""
    name = type(options).__name__
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        raise TypeError(f"{name}: rate must be a number, got {rate!r}")
    if not 0 < rate <= 1:
        raise ValueError(f"{name}: rate must be in (0, 1], the part of the elements that is sent, got {rate}")
    if abs(rate * period(rate) - 1) > _ROUNDED:
        fewer, more = math.ceil(1 / rate), math.floor(1 / rate)
        raise ValueError(
            f"{name}: rate must be 1 / n for a whole number n, since one of n elements is sent; got "
            f"{rate}, use 1/{fewer} = {1 / fewer:.4g} or 1/{more} = {1 / more:.4g}"
        )


def period(rate: float) -> int:
    """Of how many elements, or exchanges, one is sent: ``round(1 / rate)``."""
    return max(1, round(1 / rate))
