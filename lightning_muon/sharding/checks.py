"""What has to be true of a model before it is sharded, and what the ranks compare with each other."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_muon.params.uses import clean_name, parameter_uses
from lightning_muon.sharding.wrap import owners


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
