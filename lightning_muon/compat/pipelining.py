"""Private names of torch 2.11 to 2.13 for pipelines: gradients that FSDP2 sums, and reduces on demand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lightning_muon.compat.torch import _groups_of


def _gathered(root: FSDPModule) -> Iterator[tuple[Any, Tensor]]:
    """FSDP2's record of each weight of a root that was gathered before, and the whole weight."""
    for state in root._get_fsdp_state()._state_ctx.all_states:
        for group in _groups_of(state):
            for held in group.fsdp_params:
                whole = getattr(held, "_unsharded_param", None)  # Made by the first all-gather.
                if whole is None:
                    continue
                # Zeros of torch 2.11 are one element, expanded, which cannot be changed in place.
                if whole.grad is not None:
                    whole.grad = whole.grad.contiguous()
                if held.unsharded_accumulated_grad is not None:
                    held.unsharded_accumulated_grad = held.unsharded_accumulated_grad.contiguous()
                yield held, whole


def unreduced_gradients(root: FSDPModule) -> list[Tensor]:
    """What backward passes without reduction have left for the whole weights of an FSDP2 root."""
    both = [(held.unsharded_accumulated_grad, whole.grad) for held, whole in _gathered(root)]
    return [gradient for pair in both for gradient in pair if gradient is not None]


@torch.no_grad()
def accumulate_gradients(root: FSDPModule) -> None:
    """Add the gradients of whole weights to sums in the dtype in which they are reduced; local.

    FSDP2 does so behind a backward pass that reaches the inputs of its modules: not behind that of the weights alone.
    """
    for held, _ in _gathered(root):
        held.accumulate_unsharded_grad_if_needed()
        held.to_accumulated_grad_if_needed()


@torch.no_grad()
def start_reducing(root: FSDPModule) -> None:
    """Begin to reduce what backward passes without reduction have summed in an FSDP2 root; free its whole weights.

    Collective over its mesh; every rank must call it. After a backward in two parts nothing else would do it: FSDP2
    reduces in hooks of the inputs' gradients, before there are gradients of the weights.
    """
    root.set_is_last_backward(True)
    root.set_requires_gradient_sync(True)
    root.set_reshard_after_backward(True)
    for each in root._get_fsdp_state()._state_ctx.all_states:
        for group in _groups_of(each):
            group.post_backward()


def finish_reducing(root: FSDPModule) -> None:
    """Let the current stream wait for it, and whoever is given the gradients with it; local."""
    root._get_fsdp_state()._root_post_backward_final_callback()
