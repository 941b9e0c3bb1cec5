"""What does the sums for a :class:`~lightning_muon.grad_sync.reducer.GradientReducer`, and what it has launched."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


class Pending(Protocol):
    """Gradients on their way."""

    def advance(self, *, wait: bool = False) -> bool:
        """Start the communication that follows the first one, if any.

        Args:
            wait: For what it needs; otherwise it is left for another call if that is not there yet.

        Returns:
            Whether all communications have been started.
        """
        ...

    def finish(self, divisor: float, present: Collection[Tensor]) -> None:
        """Make ``sum / divisor`` available for the parameters in ``present``; drop the rest."""
        ...


class Transport(Protocol):
    """How gradients are summed over the ranks, and where the sums go."""

    def start(self, gradients: Mapping[Tensor, Tensor | None]) -> Pending:
        """Begin the sum of gradients of one dtype and device; ``None`` counts as zeros. Keeps no reference to them.

        Collective over all ranks that hold the parameters, in the same order of calls.
        """
        ...

    def resends(self, parameter: Tensor) -> bool:
        """Whether ``p.grad`` holds a sum over the ranks, to which backward may have added."""
        ...

    def is_untouched(self, parameter: Tensor) -> bool:
        """Whether ``p.grad`` is just such a sum, with nothing added or changed since."""
        ...

    def forget(self, parameters: Collection[Tensor]) -> None:
        """Drop the sums."""
        ...


@dataclass
class Traffic:
    """What was launched for one step.

    Attributes:
        launches: Index of the bucket and bytes of gradients, in order.
        overlapped_bytes: Of those that were launched by hooks, before backward was over.
    """

    launches: list[tuple[int, int]] = field(default_factory=list)
    overlapped_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of gradients that this rank has sent."""
        return sum(size for _, size in self.launches)
