"""Lets children of a sharded LightningModule be called outside of its steps, from hooks and after the training."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_muon.sharding.fsdp import callable_children
from lightning_muon.sharding.runtime import own_places

_MARK = "gathers_root_outside_steps"


def gather_root_outside_steps(module: nn.Module) -> None:
    """Gather the weights of the root while a child, or ``generate`` of a model in it, runs outside of a step.

    Inside a step, or ``forward``, the root's weights are whole already. Called from a hook or after ``fit``, a child is
    entered past its root, whose weights are shards then. Gathering is collective: as in every forward pass of a sharded
    model, all ranks must make the call. Doing this twice changes nothing.
    """
    if not isinstance(module, FSDPModule):
        return  # Each child is a root of its own.
    places = own_places(module)
    if not places:
        return
    gather = _Gather(module, places[0])
    for child in callable_children(module):
        if not isinstance(child, FSDPModule) and not hasattr(child, "_orig_mod") and _mark(child, "forward"):
            child.register_forward_pre_hook(gather.before)
            child.register_forward_hook(gather.after, always_call=True)
    for child in module.modules():
        generate = getattr(child, "generate", None)
        if (
            child is not module
            and not isinstance(child, FSDPModule)
            and callable(generate)
            and _mark(child, "generate")
        ):
            child.generate = gather.around(generate)  # type: ignore[assignment]


class _Gather:
    """Counts nested calls; the outermost gathers, and frees what it has gathered."""

    def __init__(self, root: FSDPModule, place: tuple[nn.Module, str]) -> None:
        self._root = weakref.ref(root)
        self._owner, self._attribute = weakref.ref(place[0]), place[1]
        self._depth = 0
        self._has_gathered = False

    def before(self, *_: Any) -> None:
        """Gather unless a step or an outer call has."""
        root, owner = self._root(), self._owner()
        if self._depth == 0 and root is not None and isinstance(getattr(owner, self._attribute), DTensor):
            root.unshard()
            self._has_gathered = True
        self._depth += 1

    def after(self, *_: Any) -> None:
        """Free what :meth:`before` has gathered."""
        self._depth -= 1
        root = self._root()
        if self._depth == 0 and self._has_gathered and root is not None:
            self._has_gathered = False
            root.reshard()

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """``method`` between :meth:`before` and :meth:`after`."""

        @wraps(method)
        def gathered(*args: Any, **kwargs: Any) -> Any:
            self.before()
            try:
                return method(*args, **kwargs)
            finally:
                self.after()

        return gathered


def _mark(module: nn.Module, what: str) -> bool:
    """Remember that ``module`` is prepared; ``False`` if it was already."""
    marks: set[str] = vars(module).setdefault(_MARK, set())
    is_first = what not in marks
    marks.add(what)
    return is_first
