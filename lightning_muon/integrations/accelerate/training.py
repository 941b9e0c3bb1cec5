"""One model that ``prepare`` has divided, in a loop that clips parameters, not optimizers."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from lightning_muon.engine.options import ClipGroups
from lightning_muon.engine.training import Training
from lightning_muon.grad_sync.clipping import clip_value_
from lightning_muon.optim.planned_optimizer import PlannedOptimizer
from lightning_muon.sharding.fsdp_call_log import tensors_in


class PreparedTraining(Training):
    """What belongs to the model of an Accelerator; arguments as in the base class."""

    def __init__(self, module: nn.Module, *args: Any, clip_groups: ClipGroups, **kwargs: Any) -> None:
        super().__init__(module, *args, clip_groups=clip_groups, **kwargs)
        self._clips_all = clip_groups == "all"
        self._hooks: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._before_forward),
            module.register_forward_hook(torch.compiler.disable(self._after_forward)),
        ]

    @property
    def has_run(self) -> bool:
        """Whether the module has run since the last step, so that there may be gradients."""
        return self._has_run

    @contextmanager
    def around_backward(self) -> Generator[None]:
        """As in the base class; the loss may also come from another method of the model than its forward."""
        self._has_run = True
        with super().around_backward():
            yield

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

    def close(self) -> None:
        """As in the base class."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        super().close()

    def _before_forward(self, *_: Any) -> None:
        with self.around_forward():
            pass

    def _after_forward(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        # Nobody is told of loss.backward().
        outputs = [tensor for tensor in tensors_in(output, set()) if tensor.requires_grad]
        if outputs and torch.is_grad_enabled():
            register_multi_grad_hook(outputs, self._begin_backward, mode="any")

    def _begin_backward(self, _: Tensor) -> None:
        if self._rules is not None:
            self._is_reduced = self._rules.is_last_micro_batch
            self._rules.begin_step()

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
