"""Modules that fail: what programs catch and go on after."""

from typing import Any

import torch
from torch import Tensor, nn


class OutOfMemoryError(RuntimeError):
    """What the program catches."""


class RaiseInBackward(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *_: Tensor) -> Any:
        raise OutOfMemoryError("backward")


def fail_in(module: nn.Module, where: str) -> Any:
    """A hook that makes the forward or the ``"backward"`` pass through ``module`` raise until it is removed."""

    def fail(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        if where != "backward":
            raise OutOfMemoryError(where)
        return RaiseInBackward.apply(output)  # type: ignore[return-value]

    return module.register_forward_hook(fail)
