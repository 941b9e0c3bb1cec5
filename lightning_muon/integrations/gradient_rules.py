"""What becomes of gradients between backward and the step of an optimizer: clipping, its norm, the finite check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_muon.grad_sync.clipping import clip_value_
from lightning_muon.grad_sync.finite import FiniteCheck, find_nonfinite
from lightning_muon.integrations.options import ClipGroups
from lightning_muon.optim.planned_optimizer import PlannedOptimizer
from lightning_muon.sharding.modes.mode import ShardingMode
from lightning_muon.sharding.replicas import names_of


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
