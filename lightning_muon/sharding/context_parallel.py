"""Divides the sequences of a batch over the context ranks, and gathers the parts of all of them for attention.

All context ranks of one data rank see the same batch, and each computes the loss of its own part of the positions.
FSDP2 averages gradients over data and context ranks, so a loss that is the mean over a rank's positions gives the
gradient of the mean over all of them, as long as the parts are equal.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.sharding.units import map_tensors


def split_sequence(batch: Any, mesh: DeviceMesh | None, *, dim: int = 1, keys: Collection[str] | None = None) -> Any:
    """Return the batch with the calling rank's contiguous part of every sequence; local.

    Whatever a position needs of its neighbours must be in the batch before it is divided: shift targets against inputs
    first, and pass positions along (``torch.arange(length).expand(batch, -1)``), or each part counts from 0.

    Example::

        mine = split_sequence({"tokens": tokens, "targets": targets}, mesh, keys=("tokens", "targets"))

    Args:
        batch: Tensor, or dicts, lists, tuples and dataclasses of tensors, the same on all context ranks. Other values
            are passed on.
        mesh: 1-D mesh of the context ranks; ``None`` returns the batch as it is.
        dim: Dimension of the sequence. Tensors that lack it are passed on.
        keys: Only tensors under these dict keys, field names or positions in a tuple (``"1"``), or at these paths
            (``"text.tokens"``), are divided.

    Raises:
        ValueError: If a length does not divide by the number of context ranks, a key is not found, or nothing is
            divided.
    """
    if mesh is None:
        return batch
    if isinstance(keys, str):
        raise ValueError(f"keys must be a collection of names, got the string {keys!r}")
    size, rank = _one_axis(mesh).size(), mesh.get_local_rank()
    unused, is_divided = set(keys or ()), False

    def part(name: str, tensor: Tensor) -> Tensor:
        nonlocal is_divided
        found = {name, *name.split(".")}.intersection(keys or ())
        unused.difference_update(found)
        if (keys is not None and not found) or not -tensor.ndim <= dim < tensor.ndim:
            return tensor
        is_divided = True
        if tensor.shape[dim] % size:
            raise ValueError(
                f"{name or 'the batch'} {tuple(tensor.shape)} has {tensor.shape[dim]} positions in dimension {dim}, "
                f"which {size} context ranks cannot share equally; choose another length, pad the batch, or leave the "
                "tensor out with keys=... if it is no sequence"
            )
        return tensor.chunk(size, dim)[rank].contiguous()

    result = map_tensors(batch, part)
    if unused:
        raise ValueError(f"keys names {', '.join(sorted(unused))}, but the batch has no tensor of that name")
    if not is_divided:
        raise ValueError(f"no tensor of the batch ({type(batch).__name__}) has a dimension {dim}; set dim=...")
    return result


def gather_sequence(tensor: Tensor, mesh: DeviceMesh | None, dim: int = 1) -> Tensor:
    """Return the whole sequence from the parts of all context ranks, in their order; differentiable.

    Use it for keys and values of hand-written attention. The backward pass gives each rank the sum over all ranks of
    the gradient of its part. Collective over ``mesh``, forward and backward with a part of the same shape.

    Args:
        tensor: This rank's part.
        mesh: 1-D mesh of the context ranks; ``None`` returns the tensor as it is.
        dim: Dimension of the sequence.
    """
    if mesh is None:
        return tensor
    return cast(Tensor, _GatherParts.apply(tensor, _one_axis(mesh).get_group(), dim))


class _GatherParts(torch.autograd.Function):
    """All-gather along a dimension; backward exchanges the parts of the gradient and adds them up in rank order."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part, group=group)
        return torch.cat(parts, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        sent = torch.stack(grads[0].chunk(dist.get_world_size(ctx.group), ctx.dim))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=ctx.group)
        return received.sum(0), None, None


def _one_axis(mesh: DeviceMesh) -> DeviceMesh:
    if mesh.ndim != 1:
        raise ValueError(
            f"the context ranks are one axis of a mesh, got {mesh.ndim} axes {mesh.mesh_dim_names}; give "
            'device_mesh["context"]'
        )
    return mesh
