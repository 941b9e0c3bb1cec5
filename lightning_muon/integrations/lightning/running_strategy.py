"""The part of the strategy that works while a Trainer runs: steps, gradients, evaluation."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_muon.integrations.lightning.evaluation import broadcast_buffers
from lightning_muon.integrations.lightning.steps import explain_shards
from lightning_muon.sharding.gradients import GradientAgreement
from lightning_muon.sharding.runtime import free_unsharded, let_gathers_start, set_gradient_sync


class RunningStrategy:
    """Runs the user's steps on a sharded module, and keeps its gradients and buffers equal in meaning on all ranks."""

    lightning_module: Any
    root_device: torch.device

    def __init__(self, *, early_all_gather: bool, **kwargs: Any) -> None:
        self._agreement: GradientAgreement | None = None
        self._early_all_gather = early_all_gather
        super().__init__(**kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step; one that has done its own backward passes, or none, leaves no whole weights behind."""
        with explain_shards():
            output = super().training_step(*args, **kwargs)
        if output is None:
            free_unsharded(self.lightning_module)
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step; outside of it parameters are shards again, for hooks and callbacks."""
        return self._evaluate(super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`validation_step`."""
        return self._evaluate(super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`validation_step`."""
        return self._evaluate(super().predict_step, *args, **kwargs)

    def _evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with explain_shards():
            output = step(*args, **kwargs)
        free_unsharded(self.lightning_module)
        return output

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Leave gradients unreduced: all but the last micro-batch of an accumulated one."""
        set_gradient_sync(self.lightning_module, False)
        try:
            yield
        finally:
            set_gradient_sync(self.lightning_module, True)

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step. Collective over all ranks; every rank must call it."""

        def agreed() -> Any:
            result = closure()
            if self._agreement is not None:
                self._agreement.finish()
            return result

        result = super().optimizer_step(optimizer, agreed, model, **kwargs)
        if self._early_all_gather and self.root_device.type == "cuda":
            let_gathers_start(self.lightning_module)
        return result

    def on_validation_start(self) -> None:
        """Evaluate with the running statistics of rank 0, as DDP does."""
        broadcast_buffers(self.lightning_module)
        super().on_validation_start()

    def on_train_end(self) -> None:
        """Leave equal running statistics on all ranks."""
        broadcast_buffers(self.lightning_module)
        super().on_train_end()
