"""Gradient clipping for parameters that are sharded over meshes of any kind, or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_muon.comm.mesh import axis_group


@torch.no_grad()
def clip_norm_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients in place so that their common 2-norm is at most ``max_norm``; return the norm before.

    ``torch.nn.utils.clip_grad_norm_`` refuses lists with parameters of two meshes, or with and without a mesh.
    Collective over the meshes of ``parameters``; every rank must call it, also without gradients of its own.

    A norm with a NaN or an Inf leaves the gradients as they are, so that the optimizer can still name the parameter.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    norm = total_norm(trainable)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # 1e-6 as in torch.nn.utils.clip_grad_norm_
    scale = torch.where(norm.isfinite(), scale, 1.0)
    for gradient in _local_gradients(trainable):
        gradient.mul_(scale.to(gradient.device, gradient.dtype))
    return norm


@torch.no_grad()
def clip_value_(parameters: Iterable[Tensor], max_value: float) -> None:
    """Clamp every gradient in place to ``[-max_value, max_value]``; no communication."""
    for gradient in _local_gradients(list(parameters)):
        gradient.clamp_(-max_value, max_value)


def total_norm(parameters: Sequence[Tensor]) -> Tensor:
    """2-norm of all gradients together, float32 and equal on all ranks.

    Collective over the meshes of ``parameters``; every rank must call it.
    """
    if not parameters:
        return torch.zeros(())
    sharding = [_sharding(parameter) for parameter in parameters]
    device = _local(parameters[0]).device
    squares = []
    # The list of collectives follows from the parameters, not from the gradients, which may be missing on some ranks.
    for kind in dict.fromkeys(sharding):
        members = [parameter for parameter, own in zip(parameters, sharding, strict=True) if own == kind]
        square = _local_square(_local_gradients(members), device)
        if kind is not None:
            group = axis_group(*kind).group
            if group is not None:
                dist.all_reduce(square, group=group)
        squares.append(square)
    return torch.stack(squares).sum().sqrt().float()


def _local_square(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of squares in float64 of norms in float32: on one rank the result is torch's to the last bit or two."""
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([norm.to(device) for norm in norms]).double().square().sum()


def _sharding(parameter: Tensor) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """Mesh and the axes that shard the parameter; ``None`` if each rank holds all of it."""
    if not isinstance(parameter, DTensor):
        return None
    axes = tuple(axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate())
    return (parameter.device_mesh, axes) if axes else None


def _local_gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    found = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    return [gradient for gradient in found if gradient.numel()]


def _local(tensor: Tensor | nn.Parameter) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
