"""Chooses which modules become FSDP2 units: the repeated blocks, and nothing that would tear a tie apart."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Literal

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_muon.params.uses import parameter_uses

WrapPolicy = Literal["auto"] | Collection[type[nn.Module] | str] | Callable[[str, nn.Module], bool]

# Every unit costs two collectives per step; blocks that together hold less than this share are left to the root.
_MIN_SHARE = 0.1
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def find_units(module: nn.Module, wrap_policy: WrapPolicy = "auto") -> list[nn.Module]:
    """Return the modules to shard as units of their own, inner ones first; all the rest belongs to ``module``.

    ``"auto"`` takes the classes that transformers models declare as ``_no_split_modules``, and elsewhere the outermost
    ``ModuleList`` or ``Sequential`` children that repeat a class. Modules that are sharded already and all modules
    inside them are passed over. Units that share a parameter with each other or with the rest are dropped, so that
    the root holds the tie.

    Args:
        module: The root, itself never a unit.
        wrap_policy: ``"auto"``, classes or class names, or ``policy(qualified_name, module) -> bool``.

    Raises:
        ValueError: If the policy names a class that the model lacks, or chooses a container without a forward.
    """
    if callable(wrap_policy):
        chosen = [child for name, child in _unsharded(module) if child is not module and wrap_policy(name, child)]
    elif isinstance(wrap_policy, str):
        if wrap_policy != "auto":
            raise ValueError(f"wrap_policy must be 'auto', classes or class names, or a callable, got {wrap_policy!r}")
        chosen = _automatic(module)
    else:
        chosen = _of_classes(module, wrap_policy)
    for unit in chosen:
        if isinstance(unit, _CONTAINERS) and type(unit).forward is nn.Module.forward:
            raise ValueError(
                f"wrap_policy chooses a {type(unit).__name__}, which has no forward and cannot be an FSDP2 unit; "
                "choose its children"
            )
    order = {id(child): index for index, (_, child) in enumerate(_unsharded(module))}
    with_parameters = [unit for unit in chosen if next(unit.parameters(), None) is not None]
    # Later in registration order means deeper or beside, never above: reversed, children come before parents.
    inner_first = sorted(with_parameters, key=lambda unit: -order[id(unit)])
    return _without_torn_ties(module, inner_first)


def owners(module: nn.Module, units: Collection[nn.Module]) -> dict[int, list[nn.Module]]:
    """Return id of each parameter -> the distinct innermost units (``module`` for the rest) that hold it."""
    unit_ids = {id(unit) for unit in units}
    result: dict[int, list[nn.Module]] = {}
    for uses in parameter_uses(module):
        holders = result.setdefault(id(uses[0].parameter), [])
        for use in uses:
            ancestors = (m for _, m in reversed(use.path) if id(m) in unit_ids or isinstance(m, FSDPModule))
            holder = next(ancestors, module)
            if not any(holder is other for other in holders):
                holders.append(holder)
    return result


def _unsharded(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield names and modules, parents first, each module once; does not enter modules that are sharded already."""
    seen: set[int] = set()

    def visit(prefix: str, current: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(current) in seen or (isinstance(current, FSDPModule) and current is not module):
            return
        seen.add(id(current))
        yield prefix, current
        for attribute, child in current.named_children():
            yield from visit(f"{prefix}.{attribute}" if prefix else attribute, child)

    yield from visit(name, module)


def _of_classes(module: nn.Module, classes: Collection[type[nn.Module] | str]) -> list[nn.Module]:
    chosen: dict[int, nn.Module] = {}
    for wanted in classes:
        matches = [
            child for _, child in _unsharded(module) if child is not module and wanted in _class_keys(child, wanted)
        ]
        if not matches:
            present = sorted({type(child).__name__ for _, child in _unsharded(module)})
            raise ValueError(f"wrap_policy: no module is a {wanted}; the model has {', '.join(present)}")
        chosen.update((id(child), child) for child in matches)
    return list(chosen.values())


def _class_keys(module: nn.Module, wanted: type[nn.Module] | str) -> list[type | str]:
    bases = type(module).__mro__
    return [base.__name__ for base in bases] if isinstance(wanted, str) else list(bases)


def _automatic(module: nn.Module) -> list[nn.Module]:
    minimum = _MIN_SHARE * _num_elements(module)
    chosen: list[nn.Module] = []

    def visit(current: nn.Module) -> None:
        declared = _declared_blocks(current)
        if declared:
            chosen.extend(declared)
            return
        blocks = _repeated_blocks(current)
        if sum(map(_num_elements, blocks)) >= max(minimum, 1):
            chosen.extend(blocks)
        else:
            blocks = []
        taken = {id(block) for block in blocks}
        for child in current.children():
            if id(child) not in taken and not isinstance(child, FSDPModule):
                visit(child)

    visit(module)
    distinct = {id(block): block for block in chosen}
    return [block for block in distinct.values() if block is not module]


def _declared_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the modules inside a transformers model whose classes it declares as indivisible."""
    declared = getattr(module, "_no_split_modules", None)
    if not isinstance(declared, list | tuple | set) or not declared:
        return []
    return [child for _, child in _unsharded(module) if child is not module and type(child).__name__ in declared]


def _repeated_blocks(container: nn.Module) -> list[nn.Module]:
    """Return the composite children of a list or a sequence whose class occurs at least twice among them."""
    if not isinstance(container, nn.ModuleList | nn.Sequential):
        return []
    composites = [
        child
        for child in container.children()
        if next(child.children(), None) is not None
        and not (isinstance(child, _CONTAINERS) and type(child).forward is nn.Module.forward)
    ]
    classes = [_original_class(child) for child in composites]
    repeated = [child for child, cls in zip(composites, classes, strict=True) if classes.count(cls) > 1]
    return [child for child in repeated if not isinstance(child, FSDPModule)]


def _original_class(module: nn.Module) -> type:
    """Return the class that the module had before ``fully_shard`` swapped it."""
    return next(base for base in type(module).__mro__ if not issubclass(base, FSDPModule))


def _without_torn_ties(module: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """Drop units until every parameter lies in one group: FSDP2 refuses a parameter of two groups."""
    while True:
        torn = {id(unit) for holders in owners(module, units).values() if len(holders) > 1 for unit in holders}
        kept = [unit for unit in units if id(unit) not in torn]
        if len(kept) == len(units):
            return kept
        units = kept


def _num_elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
