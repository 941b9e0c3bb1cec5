"""Scaling by tokens in a loop of the user's: one report for each backward pass."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.comm.groups import axis_group
from lightning_muon.grad_sync.token_count import TokenCount


class ReportedTokens:
    """Tokens that the losses of a step sum over.

    Construction is collective over ``mesh``; every rank must construct it.

    Args:
        mesh: The ranks with batches of their own.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._count = TokenCount(axis_group(mesh, tuple(range(mesh.ndim))))
        self._has_reported = False

    def report(self, num_tokens: int | Tensor) -> None:
        """The loss that goes to the next backward pass sums over so many tokens; local."""
        if not self._has_reported:
            self._count.begin_micro_batch()
        self._count.report(num_tokens)
        self._has_reported = True

    def begin_backward(self) -> None:
        """A backward pass begins; what is reported from now on belongs to the next one. Local."""
        if not self._has_reported:
            self._count.begin_micro_batch()  # Without a report, which is an error that all ranks get to know of.
        self._has_reported = False

    @contextmanager
    def forgotten_on_failure(self) -> Generator[None]:
        """Forget the tokens of the step so far if the block, a backward pass, raises: their gradients are dropped.

        Local; every rank must enter it.
        """
        try:
            yield
        except BaseException:
            self._count.reset()
            raise

    def divisor(self) -> float:
        """What the sum of the gradients over the ranks is to be divided by, in the last micro-batch of a step.

        Collective over the mesh; every rank must call it.
        """
        try:
            return self._count.divisor(1)
        except ValueError as error:
            error.add_note("With Fabric: fabric.strategy.report_tokens(n) before each fabric.backward(loss).")
            raise
