"""What the ways have in common in which nodes do not wait for each other's momenta."""

from __future__ import annotations

from abc import ABC, abstractmethod


class LocalSteps(ABC):
    """Every node applies its own momentum; no part of a step travels. Frozen dataclasses, no state.

    Not a :class:`~lightning_muon.replicators.replicator.Replicator`: there is nothing to encode.
    """

    @abstractmethod
    def bits_per_parameter(self) -> float:
        """Bits that a node sends for each parameter, on average over the steps."""
