"""Gives all ranks the initial weights and buffers of the first rank, in a few large messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_muon.comm.mesh import AxisGroup, axis_group
from lightning_muon.params.layout import local_tensor

_BUCKET_BYTES = 64 * 2**20


@torch.no_grad()
def broadcast_initial_state(module: nn.Module, mesh: DeviceMesh) -> None:
    """Overwrite weights and buffers with those of the first rank of the mesh; ``fully_shard`` does not do it.

    Collective over ``mesh`` and over the mesh of every DTensor; every rank must call it. A tensor becomes equal along
    all axes over which it is not divided: those of ``mesh``, those of tensor parallelism (:func:`groups_beside`), and
    those on which a DTensor is replicated. Tensors on the meta device are passed over.

    Args:
        module: The model, with plain tensors, DTensors of a tensor-parallel plan, and what the user has sharded.
        mesh: Where the model is replicated or will be sharded for data parallelism.
    """
    tensors = [tensor for tensor in _distinct_state(module) if not tensor.is_meta]
    device = mesh_device(mesh)
    for axes in (axis_group(mesh, tuple(range(mesh.ndim))), *groups_beside(module, mesh)):
        if axes.group is not None:
            ranks = set(dist.get_process_group_ranks(axes.group))
            _broadcast([local_tensor(tensor) for tensor in tensors if _is_copied(tensor, ranks)], axes.group, device)
    groups: dict[tuple[DeviceMesh, tuple[int, ...]], list[Tensor]] = {}
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            axes = tuple(axis for axis, placement in enumerate(tensor.placements) if placement.is_replicate())
            groups.setdefault((tensor.device_mesh, axes), []).append(tensor.to_local())
    for (own_mesh, axes), shards in groups.items():
        group = axis_group(own_mesh, axes).group if axes else None
        if group is not None:
            _broadcast(shards, group, device)


def groups_beside(module: nn.Module, mesh: DeviceMesh) -> list[AxisGroup]:
    """The axes of tensor parallelism: those of the DTensors in ``module`` that share only this rank with ``mesh``.

    Along them, what the plan of the user leaves out is a copy. Local; equal on all ranks that hold the same model.
    """
    meshes = dict.fromkeys(tensor.device_mesh for tensor in _distinct_state(module) if isinstance(tensor, DTensor))
    found: dict[tuple[int, ...], AxisGroup] = {}
    for own_mesh in meshes:
        for axis in range(own_mesh.ndim):
            axes = axis_group(own_mesh, (axis,))
            if axes.group is not None:
                ranks = tuple(dist.get_process_group_ranks(axes.group))
                if _only_this_rank(mesh, set(ranks)):
                    found.setdefault(ranks, axes)
    return list(found.values())


def _is_copied(tensor: Tensor, ranks: set[int]) -> bool:
    """Whether the ranks of a group hold copies because the tensor does not know of them."""
    return not isinstance(tensor, DTensor) or _only_this_rank(tensor.device_mesh, ranks)


def _only_this_rank(mesh: DeviceMesh, ranks: set[int]) -> bool:
    return ranks.intersection(mesh.mesh.flatten().tolist()) == {dist.get_rank()}


def _distinct_state(module: nn.Module) -> Iterator[Tensor]:
    """Yield parameters and buffers once each."""
    seen: set[int] = set()
    for tensor in (*module.parameters(), *module.buffers()):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """Return the device on which this rank takes part in the collectives of ``mesh``."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _broadcast(tensors: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.detach().to(device).reshape(-1) for tensor in bucket])
        # Bytes travel, so that backends without complex, bool or float8 carry those too.
        dist.broadcast(flat.view(torch.uint8), group=group, group_src=0)
        for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors of one dtype, at most ``_BUCKET_BYTES`` together unless a single one is larger."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() > 0:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same_dtype in by_dtype.values():
        bucket: list[Tensor] = []
        num_bytes = 0
        for tensor in same_dtype:
            if bucket and num_bytes + tensor.nbytes > _BUCKET_BYTES:
                yield bucket
                bucket, num_bytes = [], 0
            bucket.append(tensor)
            num_bytes += tensor.nbytes
        yield bucket
