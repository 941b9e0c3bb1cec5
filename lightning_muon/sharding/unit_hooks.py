"""What happens to the FSDP2 units of a model, told to all who listen, in one order, before FSDP2 communicates."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import FSDPModule

from lightning_muon.sharding.outputs import tensors_in, without_views
from lightning_muon.sharding.units import fsdp_modules


class UnitListener:
    """Overrides what it wants to hear of; all is local. An exception ends the pass."""

    def enters(self, unit: FSDPModule) -> None:
        """A forward pass of ``unit`` begins, which gathers its weights."""

    def returns(self, unit: FSDPModule) -> None:
        """Its forward has returned; its weights, which are freed next, are still whole."""

    def leaves(self, unit: FSDPModule) -> None:
        """Its forward pass has ended, also by an exception."""

    def enters_backward(self, unit: FSDPModule) -> None:
        """A backward pass of one of its forward passes begins, which gathers its weights."""


def listen(module: nn.Module, listeners: Sequence[UnitListener]) -> ExitStack:
    """Tell ``listeners``, which may become more, what happens to the units of ``module`` until it is closed; local."""
    hooks = ExitStack()
    for unit in fsdp_modules(module):
        _hook(unit, listeners, hooks)
    return hooks


def _hook(unit: Any, listeners: Sequence[UnitListener], hooks: ExitStack) -> None:
    @torch.compiler.disable
    def before(*_: Any) -> None:
        for each in listeners:
            each.enters(unit)

    @torch.compiler.disable
    def behind(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        for each in listeners:
            each.returns(unit)
        output = without_views(output, (args, kwargs))
        outputs = [each for each in tensors_in(output, set()) if each.requires_grad and torch.is_grad_enabled()]
        if outputs and listeners:
            register_multi_grad_hook(outputs, partial(_enter_backward, unit, listeners), mode="any")
        return output

    @torch.compiler.disable
    def at_last(*_: Any) -> None:
        for each in listeners:
            each.leaves(unit)

    # Before FSDP2's own hooks, in which a rank may wait for ever, and which hook the returned tensors; and behind them.
    hooks.enter_context(unit.register_forward_pre_hook(before, prepend=True))
    hooks.enter_context(unit.register_forward_hook(behind, prepend=True, with_kwargs=True))
    hooks.enter_context(unit.register_forward_hook(at_last, always_call=True))


def _enter_backward(unit: FSDPModule, listeners: Sequence[UnitListener], _: Tensor) -> None:
    for each in listeners:
        each.enters_backward(unit)
