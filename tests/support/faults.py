"""Modules that fail: what programs catch and go on after."""

from typing import Any

from torch import Tensor, nn


class OutOfMemoryError(RuntimeError):
    """What the program catches."""


def fail_in(module: nn.Module, where: str) -> Any:
    """A hook that makes the forward or the ``"backward"`` pass through ``module`` raise until it is removed."""

    def fail(*_: Any) -> None:
        raise OutOfMemoryError(where)

    def fail_later(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        output.register_hook(fail)

    return module.register_forward_hook(fail_later if where == "backward" else fail)
