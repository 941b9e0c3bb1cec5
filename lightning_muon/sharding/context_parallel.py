"""Divides the sequences of a batch over the context ranks, and gathers the parts of all of them for attention.

All context ranks of one data rank see the same batch, and each computes the loss of its own part of the positions.
FSDP2 averages gradients over data and context ranks, so a loss that is the mean over a rank's positions gives the
gradient of the mean over all of them, as long as the parts are equal.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

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
    parts = DTensor.from_local(tensor, _one_axis(mesh), (Shard(dim % tensor.ndim),), run_check=False)
    return parts.full_tensor(grad_placements=(Partial(),))


def _one_axis(mesh: DeviceMesh) -> DeviceMesh:
    if mesh.ndim != 1:
        raise ValueError(
            f"the context ranks are one axis of a mesh, got {mesh.ndim} axes {mesh.mesh_dim_names}; give "
            'device_mesh["context"]'
        )
    return mesh
