"""Nothing: nodes that train by themselves."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_muon.replicators.local_steps import LocalSteps


@dataclass(frozen=True)
class NoReplication(LocalSteps):
    """Nothing travels, each node applies its own momentum, and weights of nodes drift apart. 0 bits per parameter.

    The lower end of every comparison.
    """

    def bits_per_parameter(self) -> float:
        """0."""
        return 0.0
