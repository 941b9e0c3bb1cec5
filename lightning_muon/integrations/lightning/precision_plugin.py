"""Precision plugins of a Trainer: which are possible, and what they leave to the engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_muon.compat.lightning import LightningPackage, with_hook_before_step
from lightning_muon.engine.gradient_rules import parameters_of
from lightning_muon.engine.model_setup import SUPPORTED
from lightning_muon.engine.training import TrainingEngine


class EngineGradients:
    """The part of a precision plugin that deals with gradients: the engine of the run does it."""

    engine: TrainingEngine | None = None

    def post_backward(self, tensor: Tensor, module: Any) -> Any:
        """Gradients are whole before ``on_after_backward``. Collective over all ranks in the last micro-batch."""
        if self.engine is not None:
            self.engine.finish_backward()
        return super().post_backward(tensor, module)  # type: ignore[misc]

    def clip_grad_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Clip by one norm, and log it. Collective over the meshes of the parameters; every rank must call it."""
        assert self.engine is not None, "the strategy's setup comes first"
        norm = self.engine.clip_by_norm(parameters_of(optimizer), clip_val)
        self.engine.module.log("grad_norm", norm)  # type: ignore[operator]

    def clip_grad_by_value(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Clip element by element."""
        assert self.engine is not None, "the strategy's setup comes first"
        self.engine.clip_by_value(parameters_of(optimizer), clip_val)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients are clipped. Collective over the meshes of the parameters; every rank must call it."""
        if self.engine is not None:
            self.engine.before_step(optimizer)


def sharded_plugin(plugin: Any, package: LightningPackage) -> Any:
    """The counterpart of Lightning's precision ``plugin`` whose gradients are the engine's business, or an error."""
    if isinstance(plugin, EngineGradients):
        return plugin
    plugins, kind = package.module("plugins.precision"), type(plugin)
    precision = str(getattr(plugin, "precision", kind.__name__))
    arguments: dict[tuple[type[Any], str], tuple[Any, ...]] = {
        (plugins.MixedPrecision, "bf16-mixed"): ("bf16-mixed", getattr(plugin, "device", "cpu")),
        (plugins.HalfPrecision, "bf16-true"): ("bf16-true",),
        (plugins.Precision, precision): (),
    }
    if (kind, precision) in arguments:
        # A subclass, so that Lightning's checks by class (ThroughputMonitor) go on working.
        ours = type(f"Sharded{kind.__name__}", (EngineGradients, with_hook_before_step(kind)), {})
        return ours(*arguments[kind, precision])
    if precision in ("16-mixed", "16-true"):
        raise ValueError(
            f"precision={precision!r} is not supported by ParallelMuonStrategy: float16 needs loss scaling, "
            "whose skipped steps the sharded optimizer cannot agree on; use precision='bf16-mixed', or one of "
            f"{SUPPORTED}"
        )
    raise ValueError(
        f"ParallelMuonStrategy supports precision {', '.join(map(repr, SUPPORTED))}, got {kind.__name__} "
        f"(precision {precision!r}); set Trainer(precision=...) to one of these and pass no precision plugin"
    )
