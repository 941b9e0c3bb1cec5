"""The interface of a replicator: momentum -> components that are sent -> what of the momentum they stand for."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Turn:
    """Which exchange it is, equal on all nodes: what draws at random, or takes turns, draws from this.

    Attributes:
        step: Number of the exchange, from 0.
        part: Number of the buffer in which the blocks travel.
    """

    step: int
    part: int


class Components(NamedTuple):
    """What is sent of each block.

    Attributes:
        values: (num_blocks, num_sent), float32.
        positions: (num_blocks, num_sent), int64: where in the flattened block (or its transform) each value belongs;
            ``None`` where it follows from the :class:`Turn`, so that nothing but values travels.
    """

    values: Tensor
    positions: Tensor | None


class Replicator(ABC):
    """One way to choose what nodes send each other of their momenta.

    Frozen dataclasses; a replicator has no state and does not communicate, and treats every block by itself. Momenta
    come as a batch (num_blocks, *block_shape), float32. All nodes call it with batches of equal shape.

    Attributes:
        sends_positions: Whether each node chooses its own positions. If so, all nodes get what all others sent
            (all-gather, which grows with the number of nodes); else the values are summed up on the way (all-reduce).
    """

    sends_positions: ClassVar[bool]

    def block_shape(self, rows: int, cols: int) -> tuple[int, ...]:
        """Shape of the blocks into which a matrix is cut, the last ones padded with zeros.

        ``()``: not cut at all; then all parameters of a buffer come together, flattened, as one block.
        """
        del rows, cols
        return ()

    @abstractmethod
    def num_sent(self, block_numel: int) -> int:
        """Values that are sent of a block of so many elements; at least 1 for a block that is not empty."""

    @abstractmethod
    def encode(self, blocks: Tensor, turn: Turn) -> Components:
        """What is sent of ``blocks`` (num_blocks, *block_shape), which it does not change; local.

        No position occurs twice in a block.
        """

    @abstractmethod
    def decode(self, components: Components, block_shape: tuple[int, ...], turn: Turn) -> Tensor:
        """The blocks (num_blocks, *block_shape) for which ``components`` stand; linear in their values; local.

        There may be other numbers of values for each block than :meth:`num_sent`: those of several nodes. The same
        position may then occur more than once, but at most one of its values is not 0; they add up, in any order.
        """

    def subtract_(self, blocks: Tensor, components: Components, turn: Turn) -> None:
        """``blocks -= decode(components)``; for a replicator that can do it faster. Local."""
        blocks.sub_(self.decode(components, tuple(blocks.shape[1:]), turn))


class LocalSteps(ABC):
    """Every node applies its own momentum; no part of a step travels. Frozen dataclasses, no state.

    Not a :class:`~lightning_muon.flexdemo.replicator.Replicator`: there is nothing to encode.
    """

    @abstractmethod
    def bits_per_parameter(self) -> float:
        """Bits that a node sends for each parameter, on average over the steps."""


# How far rate * n may be from 1: decimals of thirds and sevenths are rounded.
_ROUNDED = 0.02
_TURN = Turn(1, 0)


def check_replicator(replicator: Replicator) -> None:
    """Raise unless the replicator does what :class:`~lightning_muon.flexdemo.replicator.Replicator` says.

    Tried on small batches, since mistakes would change the training in silence.
    """
    rows, cols = 48, 40
    shape = replicator.block_shape(rows, cols) or (rows * cols,)
    for step in range(3):
        check_blocks(replicator, shape, Turn(step, 0))


def check_blocks(replicator: Replicator, shape: tuple[int, ...], turn: Turn = _TURN) -> None:
    """As :func:`check_replicator`, for blocks of one shape.

    Args:
        replicator: To try.
        shape: Of a block.
        turn: What it is told.
    """
    name, numel = type(replicator).__name__, math.prod(shape)
    blocks = torch.randn(2, *shape, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu")
    given = blocks.clone()
    sent = replicator.encode(blocks, turn)
    again = replicator.encode(blocks, turn)
    _require(torch.equal(blocks, given), f"{name}.encode changes the blocks that it is given")
    num_sent = replicator.num_sent(numel)
    _require(num_sent >= 1, f"{name}.num_sent({numel}) is {num_sent}: blocks of shape {shape} would never be trained")
    _require(
        tuple(sent.values.shape) == (2, num_sent),
        f"{name}.encode gives values of shape {tuple(sent.values.shape)} for (2, {', '.join(map(str, shape))}) blocks; "
        f"num_sent({numel}) says (2, {num_sent})",
    )
    _require(sent.values.dtype == torch.float32, f"{name}.encode gives values of {sent.values.dtype}, not float32")
    _require(torch.equal(sent.values, again.values), f"{name}.encode gives other values when it is called again")
    _require(
        (sent.positions is not None) == replicator.sends_positions,
        f"{name}.sends_positions is {replicator.sends_positions}, but encode gives positions "
        f"{None if sent.positions is None else tuple(sent.positions.shape)}",
    )
    decoded = replicator.decode(sent, shape, turn)
    _require(decoded.shape == blocks.shape, f"{name}.decode gives {tuple(decoded.shape)}, not {tuple(blocks.shape)}")
    twice = replicator.decode(Components(2 * sent.values, sent.positions), shape, turn)
    _require(torch.allclose(twice, 2 * decoded, atol=1e-4), f"{name}.decode is not linear in the values")
    left = blocks.clone()
    replicator.subtract_(left, sent, turn)
    _require(
        torch.allclose(left, blocks - decoded, atol=1e-4),
        f"{name}.subtract_ takes off something else than decode gives",
    )
    _require(
        bool(left.norm() <= 1.001 * blocks.norm()),
        f"{name}: what encode sends and decode turns back is no part of the blocks, which grow when it is taken off "
        f"(from {blocks.norm():.3g} to {left.norm():.3g}); momenta would grow without end",
    )
    if sent.positions is not None:
        inside = bool(((sent.positions >= 0) & (sent.positions < numel)).all())
        _require(
            inside and sent.positions.dtype == torch.int64, f"{name}.encode: positions are no int64 in [0, {numel})"
        )
        _require(
            bool((sent.positions.sort(1).values.diff(dim=1) > 0).all()),
            f"{name}.encode: a position occurs twice in a block; send the sum of its values once",
        )
        twice_there = torch.cat([sent.positions] * 2, 1)
        for halves in ((sent.values, 0 * sent.values), (0 * sent.values, sent.values)):
            added = replicator.decode(Components(torch.cat(halves, 1), twice_there), shape, turn)
            message = f"{name}.decode does not add up values at the same position (scatter_add_, index_add_)"
            _require(torch.allclose(added, decoded, atol=1e-4), message)


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


def require_rate(options: object) -> None:
    """Raise unless ``rate`` is a part of the elements, in (0, 1]."""
    rate = getattr(options, "rate")  # noqa: B009
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        raise TypeError(f"{type(options).__name__}: rate must be a number, got {rate!r}")
    if not 0 < rate <= 1:
        raise ValueError(
            f"{type(options).__name__}: rate must be in (0, 1], the part of the elements that is sent, got {rate}"
        )
    every = period(rate)
    if abs(rate * every - 1) > _ROUNDED:
        fewer, more = math.ceil(1 / rate), math.floor(1 / rate)
        raise ValueError(
            f"{type(options).__name__}: rate must be 1 / n for a whole number n, since one of n elements is sent; got "
            f"{rate}, use 1/{fewer} = {1 / fewer:.4g} or 1/{more} = {1 / more:.4g}"
        )


def period(rate: float) -> int:
    """Of how many elements, or turns, one is sent: ``round(1 / rate)``."""
    return max(1, round(1 / rate))
