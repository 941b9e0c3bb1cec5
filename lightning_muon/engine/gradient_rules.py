"""The parameters of an optimizer, and the guard of their one reduction in a step by tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_muon.comm.agreement import fail_together
from lightning_muon.grad_sync.reducer import watch_gradients
from lightning_muon.sharding.base import ShardingMode


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All parameters of the param groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class SingleReductionGuard:
    """Refuses a second reducing pass that adds to gradients of a step, since each pass divides by tokens of its own."""

    def __init__(self, parameters: Sequence[Tensor], mode: ShardingMode, name: str) -> None:
        self._parameters, self._mode, self._name = list(parameters), mode, name
        self._num_passes = 0
        # By an earlier pass of this step, and by the one of now: a loss of another module may reach no parameter.
        self._was_reached = self._is_reached = False
        self.close = watch_gradients(self, self._parameters, SingleReductionGuard._arrived)

    def begin_backward(self) -> None:
        """Before a backward pass that reduces gradients; local, every rank must call it."""
        # Without gradients the user has thrown away what there was.
        self._was_reached = self._was_reached and any(map(self._mode.layout.has_gradient, self._parameters))
        self._is_reached = False

    def end_backward(self) -> None:
        """After it. Collective over all ranks in the second pass of a step; every rank must call it, and all raise."""
        if self._num_passes:
            error = None
            if self._was_reached and self._is_reached:
                error = RuntimeError(
                    f"a second backward pass of a step has added to the gradients of {self._name}, and each has "
                    "divided by tokens of its own (loss_scaling='tokens'); run all but the last inside of "
                    "no_backward_sync (no_sync, accumulate), or call zero_grad between them"
                )
            fail_together(error, None)
        self._num_passes += 1
        self._was_reached |= self._is_reached

    def end_step(self) -> None:
        """An optimizer has stepped; local."""
        self._num_passes, self._was_reached = 0, False

    def _arrived(self, _: Tensor) -> None:
        self._is_reached = True
