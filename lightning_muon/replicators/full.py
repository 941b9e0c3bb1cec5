"""Everything: an ordinary all-reduce of the momenta."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_muon.replicators.replicator import Components, Replicator, Turn


@dataclass(frozen=True)
class Full(Replicator):
    """Every element. Bits per parameter and step, with ``v`` bits for a value: ``v``."""

    sends_positions: ClassVar[bool] = False

    def num_sent(self, block_numel: int) -> int:
        """All."""
        return block_numel

    def encode(self, blocks: Tensor, turn: Turn) -> Components:
        """A copy: ``blocks`` may change before the values are sent."""
        del turn
        return Components(blocks.flatten(1).clone(), None)

    def decode(self, components: Components, block_shape: tuple[int, ...], turn: Turn) -> Tensor:
        """A view of the values."""
        del turn
        return components.values.view(components.values.size(0), *block_shape)
