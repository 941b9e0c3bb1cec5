"""Every n-th element, beginning with another one each time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_muon.replicators.checks import period, require_rate
from lightning_muon.replicators.replicator import Components, Replicator, Turn


@dataclass(frozen=True)
class Striding(Replicator):
    """Every ``n``-th element, ``n = round(1 / rate)``, from ``turn.step mod n`` on; each has its turn once in ``n``.

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
        """Enough for every turn; a turn that has one less sends a zero at the end."""
        return -(-block_numel // period(self.rate))

    def encode(self, blocks: Tensor, turn: Turn) -> Components:
        """The elements of this turn, in their order."""
        flat = blocks.flatten(1)
        taken = flat[:, self._elements(turn)]
        values = flat.new_zeros((flat.size(0), self.num_sent(flat.size(1))))
        values[:, : taken.size(1)] = taken
        return Components(values, None)

    def decode(self, components: Components, block_shape: tuple[int, ...], turn: Turn) -> Tensor:
        """Zeros everywhere else."""
        values = components.values
        blocks = values.new_zeros((values.size(0), *block_shape))
        taken = blocks.flatten(1)[:, self._elements(turn)]
        taken.copy_(values[:, : taken.size(1)])
        return blocks

    def _elements(self, turn: Turn) -> slice:
        """Which elements of a flattened block."""
        stride = period(self.rate)
        return slice(turn.step % stride, None, stride)
