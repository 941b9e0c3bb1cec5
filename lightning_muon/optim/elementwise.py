"""Updates of the parameters that are no matrices, on local shards: AdamW, and SGD for FlexDeMo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from lightning_muon.compat import foreach
from lightning_muon.params.layout import local_tensor

# One step in place for local tensors of one param group: parameters, gradients, states, and group.
Elementwise = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[dict[str, Any]], dict[str, Any]], None]
# From so many elements on, a dtype conversion costs more in bytes than in launches: 8 bytes an element at 4 TB/s,
# against 5 us a launch.
_LEAST_ALONE = 1 << 21


def number(value: Any) -> Any:
    """A hyper-parameter, which may be a tensor on the CPU, as a number."""
    return float(value) if isinstance(value, Tensor) else value


def add_scaled_(targets: Sequence[Tensor], updates: Sequence[Tensor], alpha: float) -> None:
    """Targets <- targets + alpha * updates, in the dtype of the targets, which all have the same one."""
    pairs = list(zip(targets, updates, strict=True))
    if targets[0].is_cuda and updates[0].dtype != targets[0].dtype:
        small = [(target, update) for target, update in pairs if update.numel() < _LEAST_ALONE]
        pairs = [(target, update) for target, update in pairs if update.numel() >= _LEAST_ALONE]
        if small:
            converted = [torch.empty(u.shape, dtype=target.dtype, device=target.device) for target, u in small]
            foreach.copy_(converted, [update for _, update in small])
            foreach.add_([target for target, _ in small], converted, alpha=alpha)
    if pairs:
        foreach.add_([target for target, _ in pairs], [update for _, update in pairs], alpha=alpha)


def decay_(weights: Sequence[Tensor], rate: float) -> None:
    """Weights <- weights * (1 - rate)."""
    if weights[0].device.type == "cpu":
        for weight in weights:
            # Not foreach.mul_: for bfloat16 on a CPU it rounds the factor to bfloat16, 0.998 to 0.9961.
            weight.mul_(1 - rate)
    else:
        foreach.mul_(list(weights), 1 - rate)


def adamw_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[dict[str, Any]],
    group: dict[str, Any],
) -> None:
    """One AdamW step (Loshchilov and Hutter 2019, arXiv:1711.05101, Algorithm 2); the arithmetic is torch's own."""
    beta1, beta2 = group["betas"]
    by_kernel: dict[bool, list[tuple[Tensor, ...]]] = {}
    for parameter, gradient, state in zip(params, grads, states, strict=True):
        given = parameter, gradient, local_tensor(state["exp_avg"]), local_tensor(state["exp_avg_sq"])
        # One pass over memory: on a CPU it takes a third to a fifth of the time of one operation after the other. It
        # runs over `numel` elements from the first address on: gaps between rows would be wrong.
        is_fused = parameter.device.type == "cpu" and all(map(Tensor.is_contiguous, given))
        by_kernel.setdefault(is_fused, []).append((*given, state["step"]))
    for is_fused, members in by_kernel.items():
        weights, gradients, first_moments, second_moments, steps = map(list, zip(*members, strict=True))
        adamw(
            weights,
            gradients,
            first_moments,
            second_moments,
            [],
            steps,
            foreach=weights[0].device.type == "cuda",
            fused=is_fused,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=number(group["lr"]),
            weight_decay=number(group["weight_decay"]),
            eps=group["adamw_eps"],
            maximize=False,
        )


def sgd_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[dict[str, Any]],
    group: dict[str, Any],
) -> None:
    """Params <- (1 - lr * weight_decay) * params - lr * grads; an :data:`Elementwise`."""
    lr = number(group["lr"])
    if group["weight_decay"]:
        decay_(params, lr * group["weight_decay"])
    foreach.add_(list(params), list(grads), alpha=-lr)
