"""Which gradients are clipped together, by the option ``clip_groups``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_muon.engine.options import ClipGroups
from lightning_muon.optim.planned_optimizer import PlannedOptimizer
from lightning_muon.sharding.base import ShardingMode


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All parameters of the param groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def clip_norm_of(
    parameters: Sequence[Tensor],
    max_norm: float,
    *,
    optimizers: Sequence[torch.optim.Optimizer],
    mode: ShardingMode,
    clip_groups: ClipGroups,
) -> Tensor:
    """Clip the gradients of ``parameters`` by one norm, and return the norm before.

    Collective over the mesh of ``mode``; every rank must call it.
    """
    trainable = {parameter for parameter in parameters if parameter.requires_grad}
    for optimizer in optimizers:
        own = parameters_of(optimizer)
        if trainable == {parameter for parameter in own if parameter.requires_grad}:
            parameters = own
            if len(clipped(own, optimizers, clip_groups)) == len(own):
                return mode.clip_grad_norm_(optimizer, max_norm)
    return mode.clip_norm_(clipped(parameters, optimizers, clip_groups), max_norm)


def clipped(
    parameters: Sequence[Tensor], optimizers: Sequence[torch.optim.Optimizer], clip_groups: ClipGroups
) -> Sequence[Tensor]:
    """Those of ``parameters`` that ``clip_groups`` says; local."""
    if clip_groups == "all":
        return parameters
    # Muon orthogonalizes, so the size of a gradient matters little to it, and gathers of matrices that started during
    # backward need not wait for the norm.
    matrices = {
        parameter
        for optimizer in optimizers
        if isinstance(optimizer, PlannedOptimizer)
        for parameter, route in zip(parameters_of(optimizer), optimizer.routes, strict=True)
        if route.algorithm != "adamw"
    }
    return [parameter for parameter in parameters if parameter not in matrices]
