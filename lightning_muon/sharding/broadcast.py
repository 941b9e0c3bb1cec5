"""Gives all ranks the initial weights and buffers of the first rank, a few large messages in all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_muon.comm.mesh import axis_group

_BUCKET_BYTES = 64 * 2**20


@torch.no_grad()
def broadcast_initial_state(module: nn.Module, mesh: DeviceMesh) -> None:
    """Overwrite weights and buffers with those of the first rank of the mesh; ``fully_shard`` does not do it.

    Collective over ``mesh`` and over the mesh of every DTensor; every rank must call it. Plain tensors become equal on
    the whole mesh. A DTensor (sharded by the user, or tensor parallel) becomes equal along the axes on which it is
    replicated. Tensors on the meta device are passed over.
    """
    tensors = [tensor for tensor in _distinct_state(module) if not tensor.is_meta]
    everyone = axis_group(mesh, tuple(range(mesh.ndim)))
    device = mesh_device(mesh)
    if everyone.group is not None:
        plain = [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
        _broadcast(plain, everyone.group, device)
    groups: dict[tuple[int, tuple[int, ...]], tuple[dist.ProcessGroup, list[Tensor]]] = {}
    for tensor in tensors:
        if not isinstance(tensor, DTensor):
            continue
        own_mesh = tensor.device_mesh
        axes = tuple(axis for axis, placement in enumerate(tensor.placements) if placement.is_replicate())
        group = axis_group(own_mesh, axes).group if axes else None
        if group is not None:
            groups.setdefault((id(own_mesh), axes), (group, []))[1].append(tensor.to_local())
    for group, shards in groups.values():
        _broadcast(shards, group, device)


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
