"""Parameters averaged once in a while, with an outer step of momentum."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_muon.replicators.checks import require_count
from lightning_muon.replicators.local_steps import LocalSteps


@dataclass(frozen=True, kw_only=True)
class DiLoCo(LocalSteps):
    """Nodes train by themselves and average what they moved every ``period`` steps (Douillard et al. 2023).

    With the weights ``w`` of the last average and ``w_r`` of node r after ``period`` steps, the outer gradient is
    ``g = mean_r (w - w_r)``, and all nodes go on from ``w`` after one step of SGD with ``g``: ``u <- outer_momentum * u
    + g``, ``w <- w - outer_lr * (outer_momentum * u + g)`` (with ``nesterov``; else ``w - outer_lr * u``).
    ``outer_lr=1, outer_momentum=0`` is the plain mean of the parameters, LocalSGD. Bits per parameter and step, in
    float32: ``32 / period``.

    Source: arXiv:2311.08105, Algorithm 1 and section 3 (Nesterov, learning rate 0.7, momentum 0.9); with Muon as the
    inner optimizer MuLoCo, arXiv:2505.23725.

    Attributes:
        period: Steps from one average to the next.
        outer_lr: Learning rate of the outer step.
        outer_momentum: Momentum of the outer step, in [0, 1).
        nesterov: Nesterov's momentum, the paper's; it needs an ``outer_momentum`` above 0 to make a difference.
        overlap: Let the mean travel during the following steps and apply it one period late.
    """

    period: int
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True
    overlap: bool = False

    def __post_init__(self) -> None:
        """Check the numbers."""
        require_count(self, "period")
        if not 0 < self.outer_lr < float("inf"):
            raise ValueError(f"DiLoCo: outer_lr must be positive, got {self.outer_lr}")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(f"DiLoCo: outer_momentum must be in [0, 1), got {self.outer_momentum}")

    def bits_per_parameter(self) -> float:
        """``32 / period``."""
        return 32 / self.period
