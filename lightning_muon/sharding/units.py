"""Which modules become FSDP2 units, and what has to be true of a model before it is sharded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_muon.params.uses import clean_name, parameter_uses

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


def describe_model(module: nn.Module, units: Collection[nn.Module]) -> list[tuple[str, str]]:
    """Return lines that are equal on all ranks if all hold the same model, cut into the same units."""
    lines: list[tuple[str, str]] = []
    for uses in parameter_uses(module):
        parameter = uses[0].parameter
        frozen = "" if parameter.requires_grad else ", frozen"
        ties = "".join(f", tied to {use.name}" for use in uses[1:])
        lines.append((uses[0].name, f"{_describe(parameter)}{frozen}{ties}"))
    lines.extend((clean_name(name), f"buffer {_describe(buffer)}") for name, buffer in module.named_buffers())
    unit_ids = {id(unit) for unit in units}
    lines.extend((clean_name(name), "FSDP2 unit") for name, child in module.named_modules() if id(child) in unit_ids)
    return lines


def check_meta(module: nn.Module) -> None:
    """Raise ``ValueError`` for a module with tensors both on the meta device and off it.

    Such a module cannot be materialized: ``to_empty`` and ``reset_parameters`` would wipe what it holds already.
    """
    for name, child in module.named_modules():
        tensors = {
            **dict(child.named_parameters(recurse=False)),
            **dict(child.named_buffers(recurse=False)),
        }
        on_meta = [key for key, tensor in tensors.items() if tensor.is_meta]
        if on_meta and len(on_meta) < len(tensors):
            others = [key for key in tensors if key not in on_meta]
            raise ValueError(
                f"{clean_name(name) or type(child).__name__}: {', '.join(on_meta)} on the meta device, but "
                f"{', '.join(others)} not; create all tensors of a module on the same side"
            )


def check_tensor_parallel(module: nn.Module, mesh: DeviceMesh) -> None:
    """Raise ``ValueError`` for a model of which nothing is divided over the tensor axis; local, equal on all ranks.

    Args:
        module: The model, after ``configure_model``.
        mesh: The tensor axis.
    """
    ranks = set(mesh.mesh.flatten().tolist())
    homes = {tensor.device_mesh for tensor in module.parameters() if isinstance(tensor, DTensor)}
    if not any(ranks.issubset(home.mesh.flatten().tolist()) for home in homes):
        raise ValueError(
            f"tensor_size={mesh.size()}, but no layer of {type(module).__name__} is divided over the "
            f"{mesh.size()} tensor ranks, which would all compute the same; call parallelize_module(..., "
            f"self.device_mesh[{mesh.mesh_dim_names[0]!r}], plan) in configure_model, or set tensor_size=1"  # type: ignore[index]
        )


def dtype_units(module: nn.Module, units: Collection[nn.Module]) -> list[nn.Module]:
    """Return leaf modules that need units of their own, because the unit around them has another dtype.

    FSDP2 wants one dtype for all trainable parameters of a unit. The largest part stays; every layer of another dtype
    is split off.

    Raises:
        ValueError: If a layer of another dtype cannot be split off.
    """
    holders = owners(module, units)
    elements: dict[int, dict[torch.dtype, int]] = {}
    for parameter in module.parameters():
        if _is_counted(parameter, holders):
            counts = elements.setdefault(id(holders[id(parameter)][0]), {})
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    main = {unit: max(counts, key=lambda dtype: counts[dtype]) for unit, counts in elements.items()}
    split: dict[int, nn.Module] = {}
    for uses in parameter_uses(module):
        parameter = uses[0].parameter
        if not _is_counted(parameter, holders):
            continue
        unit = holders[id(parameter)][0]
        if parameter.dtype == main[id(unit)]:
            continue
        layer = uses[0].owner
        dtypes = {p.dtype for p in layer.parameters() if p.requires_grad and p.ndim > 0}
        if layer is unit or len(dtypes) > 1 or any(use.owner is not layer for use in uses) or layer is module:
            raise ValueError(
                f"{uses[0].name} is {_name(parameter.dtype)}, but its FSDP2 unit {type(unit).__name__} is "
                f"{_name(main[id(unit)])} and the parameter cannot be split off; use one dtype, or freeze one of them"
            )
        split[id(layer)] = layer
    return list(split.values())


def _is_counted(parameter: nn.Parameter, holders: dict[int, list[nn.Module]]) -> bool:
    sharded_already = isinstance(holders[id(parameter)][0], FSDPModule)
    return parameter.requires_grad and parameter.ndim > 0 and not sharded_already


def _describe(tensor: torch.Tensor) -> str:
    kind = ""
    if isinstance(tensor, DTensor):
        kind = f"DTensor {tensor.placements} on {tuple(tensor.device_mesh.shape)} ranks "
    return f"{kind}{tuple(tensor.shape)} {_name(tensor.dtype)}{' on meta' if tensor.is_meta else ''}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
