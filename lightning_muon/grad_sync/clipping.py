"""Gradient clipping for parameters that are sharded over meshes of any kind, or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_muon.comm.collectives import start_all_reduce_sum
from lightning_muon.comm.groups import ALONE, AxisGroup, axis_group
from lightning_muon.compat import foreach
from lightning_muon.params.layout import Layout, sharded_axes

_TENSORS = Layout()


@torch.no_grad()
def clip_norm_(
    parameters: Iterable[Tensor], max_norm: float, *, layout: Layout = _TENSORS, pipeline: AxisGroup | None = None
) -> Tensor:
    """Scale all gradients in place so that their common 2-norm is at most ``max_norm``; return the norm before.

    The factor is ``min(1, max_norm / (norm + 1e-6))``, as in ``torch.nn.utils.clip_grad_norm_``, which refuses lists
    with parameters of two meshes, or with and without a mesh.

    A norm with a NaN or an Inf leaves the gradients as they are, so that the optimizer can still name the parameter.
    Frozen parameters do not count. Collective as :func:`total_norm` is; every rank must call it.

    Args:
        parameters: As in :func:`total_norm`.
        max_norm: Zero or more; Inf only measures.
        layout: As in :func:`total_norm`.
        pipeline: As in :func:`total_norm`.

    Returns:
        The norm, float32, 0-d, equal on all ranks.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm of gradient clipping must be a number of at least 0, got {max_norm}")
    listed = list(dict.fromkeys(parameters))
    norm = _square(listed, layout, pipeline).sqrt()
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    # Multiplied by 1 also: to look whether that is needed would make the host wait for the device.
    scale = torch.where(norm.isfinite(), scale, 1.0)
    for gradients in _by_device_and_dtype(_gradients(listed, layout)):
        foreach.mul_(gradients, scale.to(gradients[0].device, gradients[0].dtype))
    return norm.float()


@torch.no_grad()
def clip_value_(parameters: Iterable[Tensor], max_value: float, *, layout: Layout = _TENSORS) -> None:
    """Clamp every gradient in place to ``[-max_value, max_value]``; a NaN stays one, and an Inf becomes one.

    No communication, but for gradients that are partial sums: they are reduced first, collectively over their mesh,
    and every rank of it must call this with such a gradient.
    """
    if not max_value >= 0:
        raise ValueError(f"max_value of gradient clipping must be a number of at least 0, got {max_value}")
    listed = list(dict.fromkeys(parameters))
    _reduce_partial_sums(listed)
    for gradients in _by_device_and_dtype(_gradients(listed, layout)):
        # x - x is 0 where x is finite and NaN elsewhere: an Inf must not pass for a number.
        nothing = foreach.sub(gradients, gradients)
        foreach.clamp_min_(gradients, -max_value)
        foreach.clamp_max_(gradients, max_value)
        foreach.add_(gradients, nothing)


@torch.no_grad()
def total_norm(parameters: Iterable[Tensor], *, layout: Layout = _TENSORS, pipeline: AxisGroup | None = None) -> Tensor:
    """2-norm of all gradients together, float32 and equal on all ranks.

    An element that several ranks hold counts once, a gradient that a rank lacks as zero. Gradients that are partial
    sums are reduced first, and stay so; all ranks of their mesh, or none of them, must have them.

    Collective over the meshes of ``parameters`` (one all-reduce of one number for each distinct set of ranks over which
    parameters are sharded) and over ``pipeline``; every rank must call it, also without gradients of its own.

    Args:
        parameters: In the same order on all ranks that share a mesh; a tensor that occurs twice counts once.
        layout: Where their parts and gradients lie.
        pipeline: Ranks that hold other layers; their squares are added. Each names at least one parameter (a frozen one
            will do), whose device is the one to communicate from. A weight that two stages hold counts for each.
    """
    return _square(list(dict.fromkeys(parameters)), layout, pipeline).sqrt().float()


@dataclass(frozen=True, eq=False)
class Sharers:
    """Parameters that are shared out over the same ranks."""

    group: AxisGroup  # These ranks.
    device: torch.device  # Where tensors must be to travel between them.
    parameters: list[Tensor] = field(default_factory=list)  # The parameters, in the order in which they were listed.


def by_ranks(parameters: Iterable[Tensor], layout: Layout, *, sharded: bool) -> list[Sharers]:
    """Parameters by the set of ranks that share them, in an order in which all ranks can communicate.

    Collective over sets of ranks that span several axes the first time; every rank of them must call it.

    Args:
        parameters: In the same order on all ranks that share a mesh. Frozen ones and those without gradients count,
            so that the sets do not depend on what a rank has computed.
        layout: Where their parts lie.
        sharded: Only the axes that shard a parameter, instead of all axes of its mesh.
    """
    kinds: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    for parameter in dict.fromkeys(parameters):
        mesh, axes = _mesh_and_axes(parameter, layout, sharded=sharded)
        kinds.setdefault((mesh, axes), []).append(parameter)
    found: dict[tuple[int, ...], Sharers] = {}
    # Two kinds that have the same ranks for one rank have them for each of these ranks, so the order is theirs too.
    for (mesh, axes), members in kinds.items():
        group = axis_group(mesh, axes) if mesh is not None and axes else ALONE
        ranks = tuple(sorted(dist.get_process_group_ranks(group.group))) if group.group is not None else ()
        device = layout.local(members[0]).device
        if mesh is not None and mesh.device_type != device.type:  # parameters that rest in the memory of the host
            device = torch.device(mesh.device_type)
        found.setdefault(ranks, Sharers(group, device)).parameters.extend(members)
    return list(found.values())


def part_of_gradient(parameter: Tensor, layout: Layout) -> Tensor | None:
    """The calling rank's part of the gradient; ``None`` if the parameter is frozen, or the part missing or empty."""
    gradient = layout.gradient(parameter) if parameter.requires_grad else None
    return gradient if gradient is not None and gradient.numel() else None


def local_norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """2-norm of each tensor by itself, on its device, in its dtype but at least float32.

    torch sums squares in float32, so that a norm over sqrt(3.4e38) = 1.8e19 is Inf.
    """
    norms: dict[int, Tensor] = {}
    for same in _by_device_and_dtype(gradients):
        found = foreach.norm(same, 2, dtype=torch.float32 if same[0].dtype.itemsize < 4 else None)
        norms.update(zip(map(id, same), found, strict=True))
    return [norms[id(gradient)] for gradient in gradients]


def _mesh_and_axes(parameter: Tensor, layout: Layout, *, sharded: bool) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    """Mesh of a parameter and its axes of more than one rank; ``sharded`` leaves out those that replicate it."""
    mesh, placements = layout.mesh_and_placements(parameter)
    if mesh is None:
        return None, ()
    if sharded:
        return mesh, sharded_axes(placements, mesh.shape, f"a parameter {tuple(parameter.shape)}")
    return mesh, tuple(axis for axis in range(mesh.ndim) if mesh.shape[axis] > 1)


def _square(parameters: Sequence[Tensor], layout: Layout, pipeline: AxisGroup | None) -> Tensor:
    """Square of :func:`total_norm` in float64, which holds it where the norm is more than float32 can hold.

    Collective as :func:`total_norm` is; every rank must call it.
    """
    _reduce_partial_sums(parameters)
    sharers = by_ranks(parameters, layout, sharded=True)
    squares = [_local_square(_gradients(each.parameters, layout), each.device) for each in sharers]
    pending = [
        start_all_reduce_sum(square, each.group)
        for square, each in zip(squares, sharers, strict=True)
        if each.group.group is not None
    ]
    for work in pending:
        work.wait()
    device = next((each.device for each in sharers if each.device.type != "cpu"), torch.device("cpu"))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for square in squares:
        total += square.to(device)
    if pipeline is not None and pipeline.group is not None:
        start_all_reduce_sum(total, pipeline).wait()
    return total


def _local_square(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum in float64 of the squares of :func:`local_norms`: on one rank it is torch's to the last bit or two."""
    norms = local_norms(gradients)
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([norm.to(device) for norm in norms]).double().square().sum()


def _reduce_partial_sums(parameters: Iterable[Tensor]) -> None:
    """Lay out every gradient like its parameter, as torch's own optimizers do it.

    Collective over the mesh of each gradient that is laid out otherwise; every rank of it must have such a one.
    """
    for parameter in parameters:
        gradient = parameter.grad if isinstance(parameter, DTensor) and parameter.requires_grad else None
        if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
            parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]


def _gradients(parameters: Iterable[Tensor], layout: Layout) -> list[Tensor]:
    found = [part_of_gradient(parameter, layout) for parameter in parameters]
    return [gradient for gradient in found if gradient is not None]


def _by_device_and_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Lists that one kernel can go through."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())
