"""One model that ``prepare`` has divided, in a loop that clips parameters, not optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_muon.grad_sync.clipping import clip_value_
from lightning_muon.integrations.options import ClipGroups
from lightning_muon.integrations.training import Training
from lightning_muon.optim.planned_optimizer import PlannedOptimizer


class PreparedTraining(Training):
    """What belongs to the model of an Accelerator; arguments as in the base class."""

    def __init__(self, module: nn.Module, *args: Any, clip_groups: ClipGroups, **kwargs: Any) -> None:
        super().__init__(module, *args, clip_groups=clip_groups, **kwargs)
        self._clips_all = clip_groups == "all"
        self._hooks: list[RemovableHandle] = [module.register_forward_pre_hook(self._before_forward)]

    def clip_norm(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clip by one norm, and return the norm before. Collective over the mesh; every rank must call it."""
        rules = self._reduced("clip_grad_norm_")
        trainable = {parameter for parameter in parameters if parameter.requires_grad}
        with self.explaining():
            for optimizer in self.optimizers:
                if trainable == {parameter for parameter in _parameters(optimizer) if parameter.requires_grad}:
                    rules.clip_by_norm(optimizer, max_norm)
                    return rules.logged["grad_norm"]
            rules.finish_gradients()
            return self.mode.clip_norm_(self._clipped(parameters), max_norm)

    def clip_value(self, parameters: Sequence[Tensor], max_value: float) -> None:
        """Clip element by element. Collective over the mesh; every rank must call it."""
        rules = self._reduced("clip_grad_value_")
        with self.explaining():
            rules.finish_gradients()
            clip_value_(self._clipped(parameters), max_value, layout=self.mode.layout)

    @property
    def is_accumulating(self) -> bool:
        """Whether the micro-batch of now leaves gradients unreduced."""
        return self._rules is not None and not self._rules.is_last_micro_batch

    def close(self) -> None:
        """As in the base class."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        super().close()

    def _before_forward(self, *_: Any) -> None:
        with self.around_forward():
            pass

    def _clipped(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        if self._clips_all:
            return list(parameters)
        matrices = {
            parameter
            for optimizer in self.optimizers
            if isinstance(optimizer, PlannedOptimizer)
            for parameter, route in zip(_parameters(optimizer), optimizer.routes, strict=True)
            if route.algorithm == "muon"
        }
        return [parameter for parameter in parameters if parameter not in matrices]


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
