"""AdamW for the parameters that are no matrices, on local shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from lightning_muon.optim.binding import local_tensor


def init_adamw_state(parameter: Tensor) -> dict[str, Any]:
    """State of one parameter, with the keys of ``torch.optim.AdamW``; the moments are laid out like the parameter."""
    return {
        "step": torch.zeros((), dtype=torch.float32),
        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
    }


def adamw_step_(
    params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[dict[str, Any]], group: dict[str, Any]
) -> None:
    """One AdamW step in place for local tensors of one param group.

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101, Algorithm 2; the arithmetic is torch's own.
    """
    if not params:
        return
    beta1, beta2 = group["betas"]
    adamw(
        list(params),
        list(grads),
        [local_tensor(state["exp_avg"]) for state in states],
        [local_tensor(state["exp_avg_sq"]) for state in states],
        [],
        [state["step"] for state in states],
        foreach=params[0].device.type == "cuda",
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=float(group["lr"]),
        weight_decay=group["weight_decay"],
        eps=group["adamw_eps"],
        maximize=False,
    )
