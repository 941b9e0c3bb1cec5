"""Hooks on the user's modules and parameters that neither a copy nor torch.compile stumbles over, and that end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

Owner = TypeVar("Owner")
WhenCompiled = Literal["trace", "call", "nothing"]


class ModuleHook:
    """Calls ``action`` with the arguments of a module's hook; does nothing in a copied model.

    ``when_compiled`` says what a compiled forward does: trace ``action`` like the rest (``"trace"``), call it outside
    of the graph (``"call"``), or leave it out (``"nothing"``).
    """

    def __init__(self, action: Callable[..., object] | None = None, when_compiled: WhenCompiled = "trace") -> None:
        self._action, self._when_compiled = action, when_compiled

    def __call__(self, *args: Any) -> None:  # noqa: D102
        if self._action is None:
            return
        if self._when_compiled == "trace" or not torch.compiler.is_compiling():
            self._action(*args)
        elif self._when_compiled == "call":
            _outside_of_graph(self._action, *args)

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return ModuleHook, ()


@torch.compiler.disable
def _outside_of_graph(action: Callable[..., object], *args: Any) -> None:
    action(*args)


def watch_gradients(
    owner: Owner, parameters: Iterable[Tensor], arrived: Callable[[Owner, Tensor], None]
) -> Callable[[], object]:
    """Call ``arrived(owner, parameter)`` whenever backward has added to ``parameter.grad``; return what stops it.

    Local. The hooks are removed when their owner is garbage-collected. Frozen parameters are watched, too.
    """
    # Python's garbage collector does not look into the hooks of tensors.
    reference = weakref.ref(owner)

    def hook(parameter: Tensor) -> None:
        alive = reference()
        if alive is not None:
            arrived(alive, parameter)

    hooks = ExitStack()
    for parameter in parameters:
        # Torch refuses hooks on frozen parameters.
        is_trainable = parameter.requires_grad
        hooks.enter_context(parameter.requires_grad_(True).register_post_accumulate_grad_hook(hook))
        parameter.requires_grad_(is_trainable)
    return weakref.finalize(owner, hooks.close)
