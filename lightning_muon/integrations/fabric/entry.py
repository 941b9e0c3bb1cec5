"""The module that Fabric calls: through its forward goes every call of a method that is marked as one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_muon.sharding.fsdp_runtime import free_unsharded


class Entry(nn.Module):
    """Calls ``module``, and nothing else of the model is different.

    Fabric sends ``fabric_model.method(...)``, for a method of a LightningModule or one given to
    ``mark_forward_method``, through the forward of whatever a strategy has put around the module, as DDP does. Calling
    such a method on the module itself would find shards where FSDP2 has not gathered the weights. ``around`` is entered
    around each call.
    """

    def __init__(self, module: nn.Module, around: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self.module = module
        self._around = around

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. After a call that no backward pass can follow, as in an evaluation, weights are shards."""
        with self._around(), _without_inference_mode():
            output = self.module(*args, **kwargs)
        if not torch.is_grad_enabled() or not _may_require_grad(output):
            free_unsharded(self.module)
        return output


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that the user has set up."""
    return module.module if isinstance(module, Entry) else module


def _may_require_grad(output: Any) -> bool:
    """Whether a backward pass may start from ``output``; of a type that is not known here one may."""
    if isinstance(output, Tensor):
        return output.requires_grad
    if isinstance(output, Mapping):
        return any(map(_may_require_grad, output.values()))
    if isinstance(output, list | tuple):
        return any(map(_may_require_grad, output))
    return output is not None and not isinstance(output, bool | int | float | str)


@contextmanager
def _without_inference_mode() -> Generator[None]:
    """``no_grad`` in its place: tensors into which FSDP2 gathers weights in inference mode could not be used later."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
