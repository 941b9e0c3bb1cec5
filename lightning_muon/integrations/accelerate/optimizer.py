"""The optimizer that ``prepare`` returns: a step of it makes gradients whole first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer

from lightning_muon.engine.training import TrainingEngine


class ShardedOptimizer(AcceleratedOptimizer):
    """Accelerate's wrapper, which steps where ``accumulate`` says so, around an optimizer of a sharded model.

    Args:
        optimizer: One of those that ``engine`` steps.
        engine: The model, and what its gradients go through.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, engine: TrainingEngine) -> None:
        # Its state is on the device of its parameters already.
        super().__init__(optimizer, device_placement=False)
        self._engine = engine
        self._was_skipped = False

    @property
    def step_was_skipped(self) -> bool:
        """Whether a NaN or Inf in a gradient has made all ranks skip the last step; schedulers then wait."""
        return self._was_skipped

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, unless the batch is to be accumulated. Collective over all ranks then; every rank must call it."""
        # torch's tools for state dicts step optimizers that have no state yet, without any backward pass.
        has_gradients = closure is not None or self._engine.has_run
        if not (self.gradient_state.sync_gradients and has_gradients):
            return super().step(closure)

        def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            del optimizer
            return AcceleratedOptimizer.step(self, closure)

        before = self._engine.skipped_steps(self.optimizer)
        result = self._engine.step(self.optimizer, step, closure)
        self._was_skipped = self._engine.skipped_steps(self.optimizer) > before
        return result
