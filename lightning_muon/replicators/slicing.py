"""One slice of neighbours, which moves on each time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_muon.replicators.checks import period, require_rate
from lightning_muon.replicators.replicator import Components, Replicator, Turn


@dataclass(frozen=True)
class Slicing(Replicator):
    """The ``i``-th of ``n`` equal slices of neighbours, ``n = round(1 / rate)`` and ``i = turn.step mod n``.

    All nodes take the same, so no positions travel and values are summed up on the way. Bits per parameter and step,
    with ``v`` bits for a value: ``v / n``.

    Attributes:
        rate: Part of the elements that is sent, in (0, 1].
    """

    rate: float

    sends_positions: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Check the rate."""
        require_rate(self)

    def num_sent(self, block_numel: int) -> int:
        """The longest slice; a slice that has one less sends a zero at the end."""
        return -(-block_numel // period(self.rate))

    def encode(self, blocks: Tensor, turn: Turn) -> Components:
        """The slice of this turn."""
        flat = blocks.flatten(1)
        taken = flat[:, self._elements(flat.size(1), turn)]
        values = flat.new_zeros((flat.size(0), self.num_sent(flat.size(1))))
        values[:, : taken.size(1)] = taken
        return Components(values, None)

    def decode(self, components: Components, block_shape: tuple[int, ...], turn: Turn) -> Tensor:
        """Zeros everywhere else."""
        values = components.values
        blocks = values.new_zeros((values.size(0), *block_shape))
        flat = blocks.flatten(1)
        taken = flat[:, self._elements(flat.size(1), turn)]
        taken.copy_(values[:, : taken.size(1)])
        return blocks

    def _elements(self, block_numel: int, turn: Turn) -> slice:
        """Which elements of a flattened block."""
        num_slices = period(self.rate)
        index = turn.step % num_slices
        return slice(index * block_numel // num_slices, (index + 1) * block_numel // num_slices)
