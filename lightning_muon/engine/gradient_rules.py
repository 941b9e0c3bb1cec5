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
from lightning_muon.sharding.mode import ShardingMode
from lightning_muon.sharding.weights import names_of


class GradientRules:
    """Clips the gradients of one module, and looks for NaN and Inf in them.

    Call it after gradients are reduced. Methods are collective over the meshes of the parameters unless they say that
    they are local; every rank must call them.

    Args:
        module: The sharded module.
        mode: Knows where gradients lie.
        clip_groups: ``"all"`` clips every gradient by the norm over all of them. ``"elementwise"`` leaves out the
            matrices that run on Muon, for whose update the size of the gradient matters little: what it orthogonalizes
            has no size. Gathers of matrices that started during backward then need not wait for the norm.
        max_skipped_steps: For optimizers that do not check their gradients themselves; as in ``MuonConfig``.
    """

    def __init__(
        self, module: nn.Module, mode: ShardingMode, *, clip_groups: ClipGroups, max_skipped_steps: int
    ) -> None:
        self._mode, self._clips_all = mode, clip_groups == "all"
        self._max_skipped_steps = max_skipped_steps
        self._names = {parameter: name for name, parameter in names_of(module).items()}
        self._checks: dict[torch.optim.Optimizer, FiniteCheck] = {}
        self._norms: dict[torch.optim.Optimizer, Tensor] = {}

    def clip_by_norm(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Clip by one norm, and return the norm before."""
        parameters = parameters_of(optimizer)
        clipped = self._clipped(parameters, [optimizer])
        if len(clipped) < len(parameters):
            return self._mode.clip_norm_(clipped, max_norm)
        norm = self._norms[optimizer] = self._mode.clip_grad_norm_(optimizer, max_norm)
        return norm

    def clip_parameters_by_norm(
        self, parameters: Sequence[Tensor], optimizers: Sequence[torch.optim.Optimizer], max_norm: float
    ) -> Tensor:
        """As :meth:`clip_by_norm` for ``parameters``, the same on all ranks, which ``optimizers`` step."""
        trainable = {parameter for parameter in parameters if parameter.requires_grad}
        for optimizer in optimizers:
            if trainable == {parameter for parameter in parameters_of(optimizer) if parameter.requires_grad}:
                return self.clip_by_norm(optimizer, max_norm)
        return self._mode.clip_norm_(self._clipped(parameters, optimizers), max_norm)

    def clip_by_value(
        self, parameters: Sequence[Tensor], optimizers: Sequence[torch.optim.Optimizer], max_value: float
    ) -> None:
        """Clip the gradients of ``parameters``, which ``optimizers`` step, element by element."""
        clip_value_(self._clipped(parameters, optimizers), max_value, layout=self._mode.layout)

    def check_finite(self, optimizer: torch.optim.Optimizer) -> None:
        """After clipping: an optimizer that does not look for NaN itself gets no gradients if there is one.

        Nothing is communicated if :meth:`clip_by_norm` has taken the norm of these gradients.
        """
        norm = self._norms.pop(optimizer, None)
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

    def _clipped(self, parameters: Sequence[Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> Sequence[Tensor]:
        if self._clips_all:
            return parameters
        matrices = {
            parameter
            for optimizer in optimizers
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
