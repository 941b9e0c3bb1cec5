"""What replicators have in common that send each element once in a period, in turns."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_muon.replicators.checks import period, require_rate
from lightning_muon.replicators.replicator import Components, Replicator, Turn


@dataclass(frozen=True)
class TakingTurns(Replicator):
    """In each step one of ``n = round(1 / rate)`` parts of the elements, which has the same number on all nodes.

    So no positions travel, and values are summed up on the way. Bits per parameter and step, with ``v`` bits for a
    value: ``v / n``.

    Attributes:
        rate: Part of the elements that is sent, in (0, 1].
    """

    rate: float

    sends_positions: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Check the rate."""
        require_rate(self)

    @abstractmethod
    def elements(self, index: int, num_parts: int, block_numel: int) -> slice:
        """Which elements of a flattened block are the part ``index``."""

    def num_sent(self, block_numel: int) -> int:
        """The largest part; one that has an element less sends a zero at the end."""
        return -(-block_numel // period(self.rate))

    def encode(self, blocks: Tensor, turn: Turn) -> Components:
        """The elements of this turn, in their order."""
        flat = blocks.flatten(1)
        taken = flat[:, self._now(flat, turn)]
        values = flat.new_zeros((flat.size(0), self.num_sent(flat.size(1))))
        values[:, : taken.size(1)] = taken
        return Components(values, None)

    def decode(self, components: Components, block_shape: tuple[int, ...], turn: Turn) -> Tensor:
        """Zeros everywhere else."""
        values = components.values
        blocks = values.new_zeros((values.size(0), *block_shape))
        flat = blocks.flatten(1)
        taken = flat[:, self._now(flat, turn)]
        taken.copy_(values[:, : taken.size(1)])
        return blocks

    def _now(self, flat: Tensor, turn: Turn) -> slice:
        num_parts = period(self.rate)
        return self.elements(turn.step % num_parts, num_parts, flat.size(1))
