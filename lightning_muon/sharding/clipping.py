"""Clipping of gradients on meshes of any kind, with one norm on all ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_muon.comm.collectives import ALONE, AxisGroup, axis_group, start_all_reduce_sum
from lightning_muon.compat import foreach
from lightning_muon.math.norms import by_device_and_dtype, local_norms
from lightning_muon.params.layout import Layout, sharded_axes

_TENSORS = Layout()


@torch.no_grad()
def clip_norm_(
    parameters: Iterable[Tensor],
    max_norm: float,
    *,
    layout: Layout = _TENSORS,
    across: AxisGroup = ALONE,
    device: torch.device | None = None,
    copies: Collection[Tensor] = (),
) -> Tensor:
    """Scale all gradients in place so that their common 2-norm is at most ``max_norm``; return the norm before.

    Does what ``torch.nn.utils.clip_grad_norm_`` does, for any meshes. An element that several ranks hold counts once;
    ``copies`` of parameters elsewhere are scaled, and do not count. A norm with a NaN or an Inf leaves the gradients as
    they are, so that the optimizer can still name the parameter. Collective over the meshes of ``parameters`` and over
    ``across``, whose squares are added up with the parameters in the same order, also without gradients; ranks that
    share none may have none. The norm is float32, 0-d, on ``device`` if that is given, and equal on all ranks.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm of gradient clipping must be a number of at least 0, got {max_norm}")
    listed = _without_partial_sums(parameters)
    sets = _by_ranks([parameter for parameter in listed if parameter not in copies], layout)
    norms = [_stacked(local_norms(_gradients(each.parameters, layout)), each.device) for each in sets]
    squares = [each.double().square().sum() for each in norms]
    shared = [(square, each.group) for square, each in zip(squares, sets, strict=True) if each.group.group is not None]
    for work in [start_all_reduce_sum(square, group) for square, group in shared]:
        work.wait()
    # In float64, because the square of a norm may overflow float32; on one rank the result is that of torch to the last
    # bit or two.
    total = torch.zeros((), dtype=torch.float64, device=device or _common_device(sets))
    for square in squares:
        total += square.to(total.device)
    if across.group is not None:
        start_all_reduce_sum(total, across).wait()
    norm = total.sqrt()
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    # Multiply by 1, too: a check whether that is needed would make the host wait for the device.
    scale = torch.where(norm.isfinite(), scale, 1.0)
    for gradients in by_device_and_dtype(_gradients(listed, layout)):
        foreach.mul_(gradients, scale.to(gradients[0].device, gradients[0].dtype))
    return norm.float()


@torch.no_grad()
def clip_value_(parameters: Iterable[Tensor], max_value: float, *, layout: Layout = _TENSORS) -> None:
    """Clamp every gradient in place; a NaN stays one, and an Inf becomes one.

    Collective over the meshes of gradients that are partial sums, which are reduced first.
    """
    if not max_value >= 0:
        raise ValueError(f"max_value of gradient clipping must be a number of at least 0, got {max_value}")
    listed = _without_partial_sums(parameters)
    for gradients in by_device_and_dtype(_gradients(listed, layout)):
        # x - x is 0 where x is finite and NaN elsewhere: an Inf must not pass for a number.
        nothing = foreach.sub(gradients, gradients)
        foreach.clamp_min_(gradients, -max_value)
        foreach.clamp_max_(gradients, max_value)
        foreach.add_(gradients, nothing)


@dataclass(frozen=True, eq=False)
class _RankSet:
    """Ranks among which some parameters are sharded."""

    group: AxisGroup  # These ranks.
    device: torch.device  # Device of tensors that are sent between them.
    parameters: list[Tensor] = field(default_factory=list)  # In the order in which they were listed.


def _by_ranks(parameters: Iterable[Tensor], layout: Layout) -> list[_RankSet]:
    """Group parameters, also frozen ones, by the ranks that shard them, in an order in which all can communicate.

    Collective over sets of ranks that span several axes the first time.
    """
    kinds: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    for parameter in dict.fromkeys(parameters):
        mesh, placements = layout.mesh_and_placements(parameter)
        shape = () if mesh is None else mesh.shape
        axes = sharded_axes(placements, shape, f"a parameter {tuple(parameter.shape)}")
        kinds.setdefault((mesh, axes), []).append(parameter)
    found: dict[tuple[int, ...], _RankSet] = {}
    # If two kinds have the same ranks on one rank, they do so on each of these ranks, so all of them have this order.
    for (mesh, axes), members in kinds.items():
        group = axis_group(mesh, axes) if mesh is not None and axes else ALONE
        ranks = tuple(sorted(group.ranks))
        device = layout.local(members[0]).device
        if mesh is not None and mesh.device_type != device.type:  # parameters that rest in the memory of the host
            device = torch.device(mesh.device_type)
        found.setdefault(ranks, _RankSet(group, device)).parameters.extend(members)
    return list(found.values())


def _common_device(sets: Iterable[_RankSet]) -> torch.device:
    """Device on which results of all sets are combined: an accelerator if there is one."""
    return next((each.device for each in sets if each.device.type != "cpu"), torch.device("cpu"))


def _stacked(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.stack([norm.to(device) for norm in norms] or [torch.zeros((), device=device)])


def _without_partial_sums(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return each parameter once, after reducing gradients that have other placements.

    Collective over the mesh of each such gradient; all of its ranks must have it.
    """
    listed = list(dict.fromkeys(parameters))
    for parameter in listed:
        gradient = parameter.grad if isinstance(parameter, DTensor) and parameter.requires_grad else None
        if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
            parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return listed


def _gradients(parameters: Iterable[Tensor], layout: Layout) -> list[Tensor]:
    """The calling rank's parts of gradients, without those of frozen parameters, missing and empty ones."""
    found = [layout.gradient(parameter) for parameter in parameters if parameter.requires_grad]
    return [gradient for gradient in found if gradient is not None and gradient.numel()]
