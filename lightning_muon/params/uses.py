"""Finds the modules that hold each parameter: every place of it, ties and shared modules included."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from torch import nn
from torch.nn.parameter import UninitializedParameter

# Wrappers put these into qualified names: torch.compile and torch's activation checkpointing.
_WRAPPER_PARTS = ("_orig_mod", "_checkpoint_wrapped_module")


# Qualified names and modules from a root down.
Path = tuple[tuple[str, nn.Module], ...]


@dataclass(frozen=True, kw_only=True)
class Use:
    """One place where a parameter is registered."""

    name: str  # Qualified name without the parts that wrappers add.
    attribute: str  # Name of the parameter inside `owner`.
    owner: nn.Module  # The module that holds the parameter.
    path: Path  # Path from the root down to `owner`.
    parameter: nn.Parameter


def clean_name(name: str) -> str:
    """``name`` without the parts that ``torch.compile`` and activation checkpointing add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)


def parameter_uses(module: nn.Module) -> list[tuple[Use, ...]]:
    """The places of each distinct parameter, in the order of ``module.named_parameters()``."""
    uses: dict[int, list[Use]] = {}
    for path in walk(module):
        prefix, owner = path[-1]
        for attribute, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            name = clean_name(f"{prefix}.{attribute}" if prefix else attribute)
            if isinstance(parameter, UninitializedParameter):
                raise ValueError(
                    f"{name} of lazy module {type(owner).__name__} has no shape yet; "
                    "run one forward pass on a small batch before the optimizer or the strategy sees the model"
                )
            use = Use(name=name, attribute=attribute, owner=owner, path=path, parameter=parameter)
            uses.setdefault(id(parameter), []).append(use)
    return [tuple(places) for places in uses.values()]


def walk(module: nn.Module, name: str = "", above: Path = ()) -> Iterator[Path]:
    """Yield the path to every module, parents first; a shared module is yielded once for each of its names."""
    path = (*above, (name, module))
    yield path
    # A module that contains itself through an attribute would be walked forever.
    ancestors = {id(ancestor) for _, ancestor in path}
    for attribute, child in module._modules.items():
        if child is not None and id(child) not in ancestors:
            yield from walk(child, f"{name}.{attribute}" if name else attribute, path)


def inside_repeated_block(path: Path) -> bool:
    """Whether a module lies in a composite child of a ``ModuleList``, or of a ``Sequential`` that repeats its class."""
    for (_, parent), (_, child) in pairwise(path):
        if next(iter(child.children()), None) is None:
            continue
        if isinstance(parent, nn.ModuleList):
            return True
        if isinstance(parent, nn.Sequential) and sum(type(sibling) is type(child) for sibling in parent) > 1:
            return True
    return False
