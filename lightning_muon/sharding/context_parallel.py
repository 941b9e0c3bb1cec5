"""Divides the sequences of a batch over the context ranks, and gives attention the parts of other ranks.

All context ranks of one data rank see the same batch, and each computes the loss of its own part of the positions.
FSDP2 averages gradients over data and context ranks, so a loss that is the mean over a rank's positions gives the
gradient of the mean over all of them, as long as the parts are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel

from lightning_muon.sharding.outputs import map_tensors


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
    size, rank = _one_axis(mesh).size(), mesh.get_local_rank()

    def part(name: str, tensor: Tensor) -> Tensor:
        length = tensor.shape[dim]
        if length % size:
            raise ValueError(
                f"{name} {tuple(tensor.shape)} has {length} positions in dimension {dim}, which {size} context ranks "
                f"cannot share equally; choose another length, use pad_to_multiple(batch, {size}), or leave the "
                "tensor out with keys=... if it is no sequence"
            )
        return tensor.chunk(size, dim)[rank].contiguous()

    return _change_sequences(batch, part, dim, keys)


def pad_to_multiple(
    batch: Any,
    multiple: int,
    *,
    dim: int = 1,
    keys: Collection[str] | None = None,
    fill: Mapping[str, float | int | bool] | None = None,
) -> Any:
    """Return the batch with every sequence lengthened at its end to a multiple of ``multiple``; local.

    Ranks then count different numbers of real positions, so a mean over each rank's own is no longer the mean over
    all: scale the loss by tokens. Attention must not see the padding (a causal mask sees to it).

    Args:
        batch: As in :func:`split_sequence`.
        multiple: Number of context ranks.
        dim: Dimension of the sequence.
        keys: Which tensors, as in :func:`split_sequence`.
        fill: Value for each key (as in ``keys``), for example ``{"labels": -100}``; 0 for all others.
    """
    if multiple < 1:
        raise ValueError(f"multiple must be at least 1, got {multiple}")
    values, used = dict(fill or {}), set[str]()

    def padded(name: str, tensor: Tensor) -> Tensor:
        found = _matches(name, values)
        used.update(found)
        shape = list(tensor.shape)
        shape[dim] = -tensor.shape[dim] % multiple
        return torch.cat([tensor, tensor.new_full(shape, values[found[0]] if found else 0)], dim)

    result = _change_sequences(batch, padded, dim, keys)
    _refuse_unknown(values.keys() - used, "fill")
    return result


def gather_sequence(tensor: Tensor, mesh: DeviceMesh | None, dim: int = 1) -> Tensor:
    """Return the whole sequence from the parts of all context ranks, in their order; differentiable.

    Use it for keys and values of hand-written attention. The backward pass gives each rank the sum over all ranks of
    the gradient of its part. Collective over ``mesh``, forward and backward; every rank must call it with a part of the
    same shape.

    Args:
        tensor: This rank's part.
        mesh: 1-D mesh of the context ranks; ``None`` returns the tensor as it is.
        dim: Dimension of the sequence.
    """
    if mesh is None:
        return tensor
    return cast(Tensor, _GatherParts.apply(tensor, _one_axis(mesh).get_group(), dim))


def context_attention(mesh: DeviceMesh, buffers: Sequence[Tensor], dims: Sequence[int]) -> AbstractContextManager[None]:
    """Context manager in which ``scaled_dot_product_attention`` sees the whole sequence: torch's ``context_parallel``.

    On entry torch cuts ``buffers`` in place to the calling rank's part, and on exit it restores them. It deals the
    positions so that causal attention costs the same on all ranks; the part of a rank is therefore not contiguous, and
    :func:`split_sequence` must not be used in addition. Forward and backward both belong inside. Collective over
    ``mesh``; every rank must enter it.

    Args:
        mesh: 1-D mesh of the context ranks, on CUDA: torch has ring attention for its flash, memory-efficient and
            cuDNN kernels only.
        buffers: Every tensor with a sequence: inputs, targets, positions, tables of rotary embeddings.
        dims: Dimension of the sequence of each buffer.

    Raises:
        ValueError: Without CUDA.
    """
    if _one_axis(mesh).device_type != "cuda":
        raise ValueError(
            f"context_attention needs CUDA, but the mesh is on {mesh.device_type}: torch's ring attention has no "
            "kernels there; divide the batch with split_sequence and gather keys and values with gather_sequence"
        )
    return context_parallel(mesh, buffers=list(buffers), buffer_seq_dims=list(dims))


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


def _change_sequences(
    batch: Any, change: Callable[[str, Tensor], Tensor], dim: int, keys: Collection[str] | None
) -> Any:
    """Replace every tensor that has dimension ``dim``, and is under one of ``keys``, by ``change(path, tensor)``."""
    if isinstance(keys, str):
        raise ValueError(f"keys must be a collection of names, got the string {keys!r}")
    used: set[str] = set()
    num_changed = 0

    def visit(name: str, tensor: Tensor) -> Tensor:
        nonlocal num_changed
        found = [] if keys is None else _matches(name, keys)
        used.update(found)
        if (keys is not None and not found) or not -tensor.ndim <= dim < tensor.ndim:
            return tensor
        num_changed += 1
        return change(name or "the batch", tensor)

    result = map_tensors(batch, visit)
    _refuse_unknown(set(keys or ()) - used, "keys")
    if num_changed == 0:
        raise ValueError(f"no tensor of the batch ({type(batch).__name__}) has a dimension {dim}; set dim=...")
    return result


def _matches(name: str, keys: Collection[str]) -> list[str]:
    """Keys that are the path ``name`` or one of its steps."""
    steps = {name, *name.split(".")}
    return [key for key in keys if key in steps]


def _refuse_unknown(unknown: Collection[str], parameter: str) -> None:
    if unknown:
        raise ValueError(f"{parameter} names {', '.join(sorted(unknown))}, but the batch has no tensor of that name")
