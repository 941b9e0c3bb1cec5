"""What becomes of gradients between backward and the step of an optimizer: clipping, its norm, the finite check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_muon.comm.agreement import fail_together
from lightning_muon.engine.options import ClipGroups
from lightning_muon.grad_sync.clipping import clip_value_
from lightning_muon.grad_sync.finite import FiniteCheck, find_nonfinite
from lightning_muon.grad_sync.reducer import watch_gradients
from lightning_muon.optim.planned_optimizer import PlannedOptimizer
from lightning_muon.sharding.mode import ShardingMode
from lightning_muon.sharding.weights import names_of


class GradientRules:
    """The rules of one run.

    Args:
        module: The LightningModule, prepared; it logs ``grad_norm`` and ``skipped_steps``.
        mode: Knows where gradients lie.
        clip_groups: ``"all"`` clips every gradient by the norm over all of them. ``"elementwise"`` leaves out the
            matrices that run on Muon, for whose update the size of the gradient matters little: what it orthogonalizes
            has no size. Gathers of matrices that started during backward then need not wait for the norm.
        max_skipped_steps: For optimizers that do not check their gradients themselves; as in ``MuonConfig``.

    Attributes:
        is_last_micro_batch: Whether the backward passes of now reduce gradients.
    """

    def __init__(self, module: Any, mode: ShardingMode, *, clip_groups: ClipGroups, max_skipped_steps: int) -> None:
        self._module, self._mode, self._clip_groups = module, mode, clip_groups
        self._max_skipped_steps = max_skipped_steps
        self._names = {parameter: name for name, parameter in names_of(module).items()}
        self._checks: dict[torch.optim.Optimizer, FiniteCheck] = {}
        self._norms: dict[torch.optim.Optimizer, Tensor] = {}
        self._is_finished = False
        self.is_last_micro_batch = True

    def begin_step(self) -> None:
        """A training step begins; local."""
        self._is_finished = False

    def after_backward(self) -> None:
        """Finish gradients, so that ``on_after_backward`` finds them whole. Collective in the last micro-batch."""
        if self.is_last_micro_batch:
            self._mode.finish_gradients()
            self._is_finished = True

    def finish_gradients(self) -> None:
        """Before gradients are used. Collective over the mesh; every rank must call it.

        Manual optimization may have run ``loss.backward()``, of which nobody is told, so it is asked there again.
        """
        if not self._is_finished or not self._module.automatic_optimization:
            self._mode.finish_gradients()

    def clip_by_norm(self, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        """Clip by one norm, and log it. Collective over the meshes of the parameters; every rank must call it."""
        self.finish_gradients()
        clipped = self._clipped(optimizer)
        if len(clipped) == len(_parameters(optimizer)):
            norm = self._norms[optimizer] = self._mode.clip_grad_norm_(optimizer, max_norm)
        else:
            norm = self._mode.clip_norm_(clipped, max_norm)
        self._module.log("grad_norm", norm)

    def clip_by_value(self, optimizer: torch.optim.Optimizer, max_value: float) -> None:
        """Clip element by element. Collective over the mesh; every rank must call it."""
        self.finish_gradients()
        clip_value_(self._clipped(optimizer), max_value, layout=self._mode.layout)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """After clipping: an optimizer that would take a NaN for a number gets no gradients, and so does nothing.

        Collective over the meshes of the parameters, unless a norm was taken; every rank must call it.
        """
        norm = self._norms.pop(optimizer, None)
        if isinstance(optimizer, PlannedOptimizer):
            return
        parameters = _parameters(optimizer)
        named = {p: self._names.get(p, f"parameter {number}") for number, p in enumerate(parameters)}
        found = find_nonfinite(parameters, named, layout=self._mode.layout, known_norm=norm)
        check = self._checks.setdefault(optimizer, FiniteCheck(self._max_skipped_steps))
        if check.observe(found):
            for parameter in parameters:
                parameter.grad = None

    def skipped_steps(self, optimizer: torch.optim.Optimizer) -> int:
        """How many of its steps were skipped so far, the same on all ranks; local."""
        check = optimizer if isinstance(optimizer, PlannedOptimizer) else self._checks.get(optimizer)
        return 0 if check is None else check.skipped_steps

    def log_skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """Log how many steps were skipped so far, once there was one; local."""
        if skipped := self.skipped_steps(optimizer):
            self._module.log("skipped_steps", float(skipped))

    def _clipped(self, optimizer: torch.optim.Optimizer) -> Sequence[Tensor]:
        parameters = _parameters(optimizer)
        if self._clip_groups == "all" or not isinstance(optimizer, PlannedOptimizer):
            return parameters
        routes = zip(parameters, optimizer.routes, strict=True)
        return [parameter for parameter, route in routes if route.algorithm == "adamw"]


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class SingleReductionGuard:
    """Refuses a second reducing backward pass that adds to gradients of the same step.

    Gradients are sums over the ranks divided by tokens. Of two passes each would divide by its own tokens, and the sum
    of two means weighs the tokens of the shorter one more.

    Args:
        parameters: Those of the optimizers of one module.
        mode: Knows where their gradients are.
        name: Of the module, for messages.
    """

    def __init__(self, parameters: Sequence[Tensor], mode: ShardingMode, name: str) -> None:
        self._parameters, self._mode, self._name = list(parameters), mode, name
        self._num_passes = 0
        self._adds = False
        # By an earlier pass of this step, and by the one of now: a loss of another module may reach no parameter.
        self._was_reached = self._is_reached = False
        self._remove_hooks = watch_gradients(self, self._parameters, SingleReductionGuard._arrived)

    def begin_backward(self) -> None:
        """Before a backward pass that reduces gradients; local, every rank must call it."""
        layout = self._mode.layout
        # Without gradients the user has thrown away what there was.
        self._adds = self._num_passes > 0 and any(map(layout.has_gradient, self._parameters))
        self._was_reached &= self._adds
        self._is_reached = False

    def end_backward(self) -> None:
        """After it, once gradients are finished. Collective over all ranks in the second pass of a step.

        Every rank must call it.

        Raises:
            RuntimeError: On all ranks, if the pass has added to gradients of the same step.
        """
        if self._adds:
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

    def close(self) -> None:
        """Remove the hooks; local."""
        self._remove_hooks()

    def _arrived(self, _: Tensor) -> None:
        self._is_reached = True
