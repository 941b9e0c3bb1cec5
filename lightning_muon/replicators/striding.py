"""Every n-th element, from another one on each time."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_muon.replicators.taking_turns import TakingTurns


@dataclass(frozen=True)
class Striding(TakingTurns):
    """Every ``n``-th element, ``n = round(1 / rate)``, from ``turn.step mod n`` on.

    Bits per parameter and step, with ``v`` bits for a value: ``v / n``.

    Attributes:
        rate: Part of the elements that is sent, in (0, 1].
    """

    def elements(self, index: int, num_parts: int, block_numel: int) -> slice:
        """All that are as far apart as there are parts."""
        return slice(index, block_numel, num_parts)
