"""What becomes of gradients between backward and the step of an optimizer: clipping, finite check, one reduction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_muon.comm.agreement import fail_together
from lightning_muon.engine.options import ClipGroups
from lightning_muon.grad_sync.clipping import clip_value_
from lightning_muon.grad_sync.finite import FiniteCheck, find_nonfinite
from lightning_muon.grad_sync.reducer import watch_gradients
from lightning_muon.optim.planned_optimizer import PlannedOptimizer
from lightning_muon.sharding.base import ShardingMode
from lightning_muon.sharding.weights import names_of


class GradientRules:
    """Clips the reduced gradients of one module, and looks for NaN and Inf in them.

    Methods are collective over the meshes of the parameters unless they say that they are local; every rank must call
    them.
    """

    def __init__(
        self,
        module: nn.Module,
        mode: ShardingMode,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        clip_groups: ClipGroups,
        max_skipped_steps: int,  # For optimizers that do not check their gradients themselves.
    ) -> None:
        self._mode, self._optimizers = mode, optimizers
        self._clips_all, self._max_skipped_steps = clip_groups == "all", max_skipped_steps
        self._names = {parameter: name for name, parameter in names_of(module).items()}
        self._checks: dict[torch.optim.Optimizer, FiniteCheck] = {}
        self._norms: dict[torch.optim.Optimizer, Tensor] = {}

    def clip_by_norm(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clip by one norm, and return the norm before; ``parameters`` are the same on all ranks."""
        trainable = {parameter for parameter in parameters if parameter.requires_grad}
        for optimizer in self._optimizers:
            own = parameters_of(optimizer)
            if trainable == {parameter for parameter in own if parameter.requires_grad}:
                clipped = self._clipped(own)
                if len(clipped) < len(own):
                    return self._mode.clip_norm_(clipped, max_norm)
                norm = self._norms[optimizer] = self._mode.clip_grad_norm_(optimizer, max_norm)
                return norm
        return self._mode.clip_norm_(self._clipped(parameters), max_norm)

    def clip_by_value(self, parameters: Sequence[Tensor], max_value: float) -> None:
        """Clip element by element."""
        clip_value_(self._clipped(parameters), max_value, layout=self._mode.layout)

    def check_finite(self, optimizer: torch.optim.Optimizer) -> None:
        """After clipping: an optimizer that does not look for NaN itself gets no gradients if there is one."""
        norm = self._norms.pop(optimizer, None)  # With it nothing is communicated.
        if isinstance(optimizer, PlannedOptimizer):
            return
        parameters = parameters_of(optimizer)
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

    def _clipped(self, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        if self._clips_all:
            return parameters
        # Muon orthogonalizes, so the size of a gradient matters little to it, and gathers of matrices that started
        # during backward need not wait for the norm.
        matrices = {
            parameter
            for optimizer in self._optimizers
            if isinstance(optimizer, PlannedOptimizer)
            for parameter, route in zip(parameters_of(optimizer), optimizer.routes, strict=True)
            if route.algorithm != "adamw"
        }
        return [parameter for parameter in parameters if parameter not in matrices]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All parameters of the param groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class SingleReductionGuard:
    """Refuses a second reducing backward pass that adds to gradients of the same step.

    With ``loss_scaling="tokens"`` gradients are sums over the ranks divided by the number of tokens. Two reducing
    passes would each divide by their own number, which over-weights the tokens of the shorter one.
    """

    def __init__(self, parameters: Sequence[Tensor], mode: ShardingMode, name: str) -> None:
        self._parameters, self._mode, self._name = list(parameters), mode, name
        self._num_passes = 0
        self._adds = False
        # By an earlier pass of this step, and by the one of now: a loss of another module may reach no parameter.
        self._was_reached = self._is_reached = False
        self.close = watch_gradients(self, self._parameters, SingleReductionGuard._arrived)

    def begin_backward(self) -> None:
        """Before a backward pass that reduces gradients; local, every rank must call it."""
        layout = self._mode.layout
        # Without gradients the user has thrown away what there was.
        self._adds = self._num_passes > 0 and any(map(layout.has_gradient, self._parameters))
        self._was_reached &= self._adds
        self._is_reached = False

    def end_backward(self) -> None:
        """After it. Collective over all ranks in the second pass of a step; every rank must call it, and all raise."""
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

    def _arrived(self, _: Tensor) -> None:
        self._is_reached = True
