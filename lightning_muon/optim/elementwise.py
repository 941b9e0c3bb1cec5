"""Updates of the parameters that are no matrices, on local shards: AdamW, and SGD for FlexDeMo."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from lightning_muon.compat import foreach
from lightning_muon.params.layout import local_tensor

# One step in place for local tensors of one param group: parameters, gradients, states, group, and the values of
# hyper-parameters that are tensors on a device.
Elementwise = Callable[
    [Sequence[Tensor], Sequence[Tensor], Sequence[dict[str, Any]], dict[str, Any], Mapping[Tensor, float]], None
]
# From so many elements on, a dtype conversion costs more in bytes than in launches: 8 bytes an element at 4 TB/s,
# against 5 us a launch.
_LEAST_ALONE = 1 << 21


def number(value: Any, numbers: Mapping[Tensor, float]) -> Any:
    """A hyper-parameter as a number; a tensor that is not among the known ``numbers`` is read from its device."""
    if not isinstance(value, Tensor):
        return value
    return numbers[value] if value in numbers else float(value)


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


def decay_cautiously_(weights: Sequence[Tensor], updates: Sequence[Tensor], rate: float) -> None:
    """Weights <- weights * (1 - rate) where update * weight >= 0; the step subtracts the updates afterwards.

    Source: Chen et al. 2025, arXiv:2510.12402, Algorithm 1.
    """
    for weight, update in zip(weights, updates, strict=True):
        weight.copy_(torch.where(update * weight >= 0, weight * (1 - rate), weight))


def adamw_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[dict[str, Any]],
    group: dict[str, Any],
    numbers: Mapping[Tensor, float],
) -> None:
    """One AdamW step (Loshchilov and Hutter 2019, arXiv:1711.05101, Algorithm 2); the arithmetic is torch's own."""
    beta1, beta2 = group["betas"]
    is_fused = params[0].device.type == "cpu"
    moments = [(local_tensor(state["exp_avg"]), local_tensor(state["exp_avg_sq"])) for state in states]
    given = [(p, g, *of_p) for p, g, of_p in zip(params, grads, moments, strict=True)]
    # The fused kernel of CPUs runs over `numel` elements from the first address on: gaps between rows would be wrong.
    apart = [n for n, tensors in enumerate(given) if is_fused and not all(map(Tensor.is_contiguous, tensors))]
    used = [tuple(map(Tensor.contiguous, tensors)) if n in apart else tensors for n, tensors in enumerate(given)]
    weights, gradients, first_moments, second_moments = map(list, zip(*used, strict=True))
    lr, weight_decay = number(group["lr"], numbers), group["weight_decay"]
    if group.get("cautious_weight_decay", False):
        # The update has the sign of the first moment that the kernel is about to write.
        for weight, gradient, moment in zip(weights, gradients, first_moments, strict=True):
            ahead = moment.lerp(gradient.to(moment.dtype), 1 - beta1)
            decay_cautiously_([weight], [ahead.sign_()], lr * number(weight_decay, numbers))
        weight_decay = 0.0
    adamw(
        weights,
        gradients,
        first_moments,
        second_moments,
        [],
        [state["step"] for state in states],
        foreach=params[0].device.type == "cuda",
        # One pass over memory: on a CPU it takes a third to a fifth of the time of one operation after the other.
        fused=is_fused,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=lr,
        weight_decay=weight_decay,
        eps=group["adamw_eps"],
        maximize=False,
    )
    for n in apart:
        for place in (0, 2, 3):  # Gradients stay as they are.
            if given[n][place] is not used[n][place]:
                given[n][place].copy_(used[n][place])


def sgd_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[dict[str, Any]],
    group: dict[str, Any],
    numbers: Mapping[Tensor, float],
) -> None:
    """Params <- (1 - lr * weight_decay) * params - lr * grads; an :data:`Elementwise`."""
    lr = number(group["lr"], numbers)
    if group.get("cautious_weight_decay", False):
        decay_cautiously_(params, grads, lr * group["weight_decay"])
    elif group["weight_decay"]:
        for param in params:
            # Not foreach.mul_, which rounds the factor to bfloat16 for such weights on a CPU.
            param.mul_(1 - lr * group["weight_decay"])
    foreach.add_(list(params), list(grads), alpha=-lr)
