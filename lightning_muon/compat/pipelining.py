"""Private names of torch 2.11 to 2.13 for pipelines: backward in two parts, and the sum of gradients on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from lightning_muon.compat.torch import _groups_of

WeightPart = list[dict[str, Any]]
"""What :func:`backward_input` has left for :func:`backward_weight`."""


def backward_input(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor] | None,
    inputs: Sequence[Tensor],
    weights: Iterator[nn.Parameter],
) -> WeightPart:
    """Backward as far as ``inputs``, whose ``grad`` it sets; ``gradients`` are those of ``outputs``, or ones."""
    _, rest = stage_backward_input(list(outputs), None if gradients is None else list(gradients), list(inputs), weights)
    return rest


def backward_weight(weights: Iterator[nn.Parameter], rest: WeightPart) -> None:
    """The other part of the backward, which adds to the gradients of ``weights``."""
    stage_backward_weight(weights, rest)


def unreduced_gradients(root: FSDPModule) -> list[tuple[Tensor, Tensor]]:
    """Whole weights, and the gradients that backward passes without reduction have left for them, of an FSDP2 root."""
    found: list[tuple[Tensor, Tensor]] = []
    for state in root._get_fsdp_state()._state_ctx.all_states:
        for group in _groups_of(state):
            for held in group.fsdp_params:
                whole = getattr(held, "_unsharded_param", None)  # Made by the first all-gather.
                if whole is not None:
                    if whole.grad is not None:
                        whole.grad = whole.grad.contiguous()  # Zeros of torch 2.11 are one element, expanded.
                    both = (held.unsharded_accumulated_grad, whole.grad)
                    found += [(whole, gradient) for gradient in both if gradient is not None]
    return found


@torch.no_grad()
def reduce_gradients(root: FSDPModule) -> None:
    """Reduce what backward passes without reduction have summed in an FSDP2 root, and free its whole weights.

    Collective over its mesh; every rank must call it. After a backward in two parts nothing else would do it: FSDP2
    reduces in hooks of the inputs' gradients, before there are gradients of the weights.
    """
    state = root._get_fsdp_state()
    root.set_is_last_backward(True)
    root.set_requires_gradient_sync(True)
    root.set_reshard_after_backward(True)
    for each in state._state_ctx.all_states:
        for group in _groups_of(each):
            group.post_backward()
    state._root_post_backward_final_callback()
