"""The units of a model, modules whose weights FSDP2 gathers together: how they are chosen, and what happens to them."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_muon.compat.torch import viewed
from lightning_muon.params.layers import Use, parameter_uses

WrapPolicy = Literal["auto"] | Collection[type[nn.Module] | str] | Callable[[str, nn.Module], bool]

# Every unit costs two collectives per step; blocks that together hold less than this share stay in the root.
_MIN_SHARE = 0.1


def find_units(module: nn.Module, wrap_policy: WrapPolicy = "auto") -> list[nn.Module]:
    """Return the modules to shard as units of their own, inner ones first; all the rest belongs to ``module``.

    ``"auto"`` takes the classes that transformers models declare as ``_no_split_modules``, and elsewhere the outermost
    ``ModuleList`` or ``Sequential`` children that repeat a class. Otherwise ``wrap_policy`` is classes or class names,
    or ``policy(qualified_name, module) -> bool``. Units that share a parameter with others are left to the root.
    """
    candidates = list(_unsharded(module))
    if callable(wrap_policy):
        chosen = [child for name, child in candidates if wrap_policy(name, child)]
    elif isinstance(wrap_policy, str):
        if wrap_policy != "auto":
            raise ValueError(f"wrap_policy must be 'auto', classes or class names, or a callable, got {wrap_policy!r}")
        chosen = _automatic(module)
    else:
        chosen = _of_classes([child for _, child in candidates], wrap_policy)
    # A module that is registered later is never a parent of an earlier one: reversed, children come before parents.
    units = [child for _, child in reversed(candidates) if child in chosen and [*child.parameters()]]
    # FSDP2 refuses a parameter of two groups.
    while torn := {unit for holders in owners(module, units).values() if len(holders) > 1 for unit in holders}:
        kept = [unit for unit in units if unit not in torn]
        if len(kept) == len(units):
            break
        units = kept
    return units


def owners(module: nn.Module, units: Collection[nn.Module]) -> dict[Tensor, list[nn.Module]]:
    """Each parameter -> the distinct innermost units (``module`` for the rest) that hold it."""
    known = set(units)
    return {
        uses[0].parameter: list(
            dict.fromkeys(
                next((m for _, m in reversed(use.path) if m in known or isinstance(m, FSDPModule)), module)
                for use in uses
            )
        )
        for uses in parameter_uses(module)
    }


def units_of(root: nn.Module, units: Collection[nn.Module]) -> dict[nn.Module, list[Tensor]]:
    """The parameters that the forward of ``root``, and of each unit, may use outside of the units inside it.

    A parameter that is used in several units, or in none, belongs to ``root`` too.
    """
    found: dict[nn.Module, list[Tensor]] = {root: [], **{unit: [] for unit in units}}
    for parameter, holders in owners(root, units).items():
        for holder in dict.fromkeys([*holders, root] if len(holders) > 1 else holders):
            found[holder].append(parameter)
    return found


def callable_children(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children; for a list or a dict without a forward, yield its entries instead."""
    for child in module.children():
        if is_container(child):
            yield from callable_children(child)
        else:
            yield child


def is_container(module: nn.Module) -> bool:
    """Whether it is a list or a dict of modules without a forward."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward


def _unsharded(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules inside ``module``, parents first, without those that are sharded already, or inside of them."""
    roots = (child for child in module.modules() if isinstance(child, FSDPModule) and child is not module)
    sharded = {child for root in roots for child in root.modules()}
    return ((name, child) for name, child in module.named_modules() if child is not module and child not in sharded)


def _of_classes(modules: Sequence[nn.Module], classes: Collection[type[nn.Module] | str]) -> list[nn.Module]:
    chosen: dict[nn.Module, None] = {}
    for wanted in classes:
        matches = [child for child in modules if any(wanted in (c, c.__name__) for c in type(child).__mro__)]
        if not matches:
            present = ", ".join(sorted({type(child).__name__ for child in modules}))
            raise ValueError(f"wrap_policy: no module is a {wanted}; the model has {present}")
        chosen.update(dict.fromkeys(matches))
    return list(chosen)


def _automatic(module: nn.Module) -> list[nn.Module]:
    minimum = max(_MIN_SHARE * _num_elements(module), 1)
    chosen: dict[nn.Module, None] = {}

    def visit(current: nn.Module) -> None:
        # Classes that a transformers model declares as indivisible.
        declared = getattr(current, "_no_split_modules", None)
        inside: list[nn.Module] = []
        if isinstance(declared, list | tuple | set) and declared:
            inside = [child for _, child in _unsharded(current) if type(child).__name__ in declared]
        blocks = inside or _repeated_blocks(current)
        if not inside and sum(map(_num_elements, blocks)) < minimum:
            blocks = []
        chosen.update(dict.fromkeys(blocks))
        for child in () if inside else current.children():
            if child not in blocks and not isinstance(child, FSDPModule):
                visit(child)

    visit(module)
    return [block for block in chosen if block is not module]


def _repeated_blocks(container: nn.Module) -> list[nn.Module]:
    """Return the composite children of a list or a sequence whose class occurs at least twice among them."""
    if not isinstance(container, nn.ModuleList | nn.Sequential):
        return []
    classes = {
        child: original_class(child)
        for child in container.children()
        if next(child.children(), None) is not None and not is_container(child)
    }
    counts = Counter(classes.values())
    return [child for child, cls in classes.items() if counts[cls] > 1 and not isinstance(child, FSDPModule)]


def original_class(module: nn.Module) -> type:
    """The class that the module had before ``fully_shard`` swapped it."""
    return next(base for base in type(module).__mro__ if not issubclass(base, FSDPModule))


def _num_elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def dtype_units(module: nn.Module, units: Collection[nn.Module]) -> list[nn.Module]:
    """Layers to shard as units of their own, because FSDP2 wants one dtype for all that trains in a unit.

    The dtype with most elements stays in the unit.
    """
    holders = owners(module, units)
    elements: dict[nn.Module, Counter[torch.dtype]] = {}
    counted: list[tuple[nn.Module, tuple[Use, ...]]] = []
    for uses in parameter_uses(module):
        parameter = uses[0].parameter
        unit, *others = holders[parameter]
        if parameter.requires_grad and parameter.ndim > 0 and not others and not isinstance(unit, FSDPModule):
            elements.setdefault(unit, Counter())[parameter.dtype] += parameter.numel()
            counted.append((unit, uses))
    split: dict[nn.Module, None] = {}
    for unit, uses in counted:
        parameter, layer = uses[0].parameter, uses[0].owner
        ((main, _),) = elements[unit].most_common(1)
        if parameter.dtype == main:
            continue
        dtypes = {p.dtype for p in layer.parameters() if p.requires_grad and p.ndim > 0}
        if layer is unit or len(dtypes) > 1 or any(use.owner is not layer for use in uses) or layer is module:
            raise ValueError(
                f"{uses[0].name} is {dtype_name(parameter.dtype)}, but its FSDP2 unit {type(unit).__name__} is "
                f"{dtype_name(main)} and the parameter cannot be split off; use one dtype, freeze one of them, or "
                "put the parameter into a module of its own"
            )
        split[layer] = None
    return list(split)


def fsdp_modules(module: nn.Module) -> Iterator[FSDPModule]:
    """Yield the FSDP2 units of ``module``, the root first."""
    return (child for child in module.modules() if isinstance(child, FSDPModule))


def fsdp_roots(module: nn.Module) -> Iterator[FSDPModule]:
    """Yield the outermost FSDP2 units of ``module``."""
    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from fsdp_roots(child)


def own_places(unit: FSDPModule) -> list[tuple[nn.Module, str]]:
    """One (module, attribute) for each sharded parameter of a unit, without those of units inside it."""
    places: dict[DTensor, tuple[nn.Module, str]] = {}

    def visit(module: nn.Module) -> None:
        for attribute, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                places.setdefault(parameter, (module, attribute))
        for child in module.children():
            if not isinstance(child, FSDPModule):
                visit(child)

    visit(unit)  # type: ignore[arg-type]
    return list(places.values())


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


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

    @torch.compiler.disable
    def before(unit: Any, *_: Any) -> None:
        for each in listeners:
            each.enters(unit)

    @torch.compiler.disable
    def behind(unit: Any, args: Any, kwargs: Any, output: Any) -> Any:
        for each in listeners:
            each.returns(unit)
        output = without_views(output, (args, kwargs))
        outputs = [each for each in tensors_in(output) if each.requires_grad and torch.is_grad_enabled()]
        if outputs and listeners:
            register_multi_grad_hook(outputs, partial(_enter_backward, unit, listeners), mode="any")
        return output

    @torch.compiler.disable
    def at_last(unit: Any, *_: Any) -> None:
        for each in listeners:
            each.leaves(unit)

    hooks, units = ExitStack(), cast(Iterator[Any], fsdp_modules(module))
    for unit in units:
        # Before FSDP2's own hooks, in which a rank may wait for ever, and which hook the returned tensors; behind them.
        hooks.enter_context(unit.register_forward_pre_hook(before, prepend=True))
        hooks.enter_context(unit.register_forward_hook(behind, prepend=True, with_kwargs=True))
        hooks.enter_context(unit.register_forward_hook(at_last, always_call=True))
    return hooks


def _enter_backward(unit: FSDPModule, listeners: Sequence[UnitListener], _: Tensor) -> None:
    for each in listeners:
        each.enters_backward(unit)


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
