"""One slice of neighbours, which moves on each time."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_muon.replicators.taking_turns import TakingTurns


@dataclass(frozen=True)
class Slicing(TakingTurns):
    """The ``i``-th of ``n = round(1 / rate)`` equal slices of neighbours, ``i = turn.step mod n``.

    Bits per parameter and step, with ``v`` bits for a value: ``v / n``.

    Attributes:
        rate: Part of the elements that is sent, in (0, 1].
    """

    def elements(self, index: int, num_parts: int, block_numel: int) -> slice:
        """Neighbours."""
        return slice(index * block_numel // num_parts, (index + 1) * block_numel // num_parts)
