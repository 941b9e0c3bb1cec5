"""Finds the tensors in inputs and outputs of a module, and replaces those that are views."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from lightning_muon.compat.torch import viewed


def without_views(output: Any, inputs: Any) -> Any:
    """Replace each view in ``output`` of a forward pass that requires a gradient by an alias; copies nothing. Local.

    FSDP2 gathers weights for backward in hooks of these tensors, and a view that is changed in place loses its hooks.
    """
    tensors = list(tensors_in(output)) if torch.is_grad_enabled() else []
    views = {id(tensor): tensor for tensor in tensors if tensor.requires_grad and viewed(tensor) is not tensor}
    if not views:
        return output
    # Autograd does not know that an alias shares memory with other tensors, so what backward needs must not change.
    others = {id(tensor): tensor for tensor in [*tensors, *tensors_in(inputs)]}
    users = Counter(id(viewed(tensor)) for tensor in others.values())
    aliases: dict[int, Tensor] = {}
    for key, view in views.items():
        memory = viewed(view)
        aliases[key] = _Alias.apply(view, memory.is_leaf or users[id(memory)] > 1)  # type: ignore[assignment]
    return map_tensors(output, lambda _, tensor: aliases.get(id(tensor), tensor))


class _Alias(torch.autograd.Function):
    """A tensor, not a view, on the memory of a view; if it ``is_shared``, backward raises after a change in place."""

    @staticmethod
    def forward(ctx: Any, view: Tensor, is_shared: bool) -> Tensor:
        if is_shared:
            ctx.save_for_backward(view)
        return view.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _ = ctx.saved_tensors  # Autograd compares the versions.
        return gradient, None


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value and its containers."""
    entries: Iterable[Any] = ()
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        entries = value.values()
    elif isinstance(value, list | tuple):
        entries = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        entries = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    for entry in entries:
        yield from tensors_in(entry)


def map_tensors(value: Any, visit: Callable[[str, Tensor], Tensor], path: tuple[str, ...] = ()) -> Any:
    """Copy ``value`` with ``visit(path, tensor)`` in place of each tensor in its containers."""
    if isinstance(value, Tensor):
        return visit(".".join(path), value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        changed = {name: map_tensors(getattr(value, name), visit, (*path, name)) for name in names}
        return dataclasses.replace(value, **changed)
    if isinstance(value, MutableMapping):
        result = copy.copy(value)
        result.update({key: map_tensors(inner, visit, (*path, str(key))) for key, inner in value.items()})
        return result
    if isinstance(value, tuple | list):
        items = [map_tensors(inner, visit, (*path, str(index))) for index, inner in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # a namedtuple takes each
    return value
