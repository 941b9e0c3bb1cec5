"""Hooks on the user's modules that neither a copy of the module nor torch.compile stumbles over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

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
