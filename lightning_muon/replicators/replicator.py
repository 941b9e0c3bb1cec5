"""The interface of a replicator: momentum -> components that are sent -> what of the momentum they stand for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

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
