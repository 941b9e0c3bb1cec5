"""Makes weights and buffers equal on all ranks."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import accumulate, groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_muon.comm.groups import AxisGroup, axis_group
from lightning_muon.params.layout import local_tensor
from lightning_muon.params.uses import parameter_uses

_BUCKET_BYTES = 64 * 2**20
JOINS_STATE_DICTS = ContextVar("JOINS_STATE_DICTS", default=False)  # Whether it is in :func:`joined_state_dicts`.


@contextmanager
def joined_state_dicts() -> Generator[None]:
    """Context, or decorator, for what joins the state dicts of all ranks.

    ``module.state_dict()`` then has what this rank has of a pipeline, and main weights, as DTensors, in place of their
    roundings; with these it is collective over the mesh of the module.
    """
    token = JOINS_STATE_DICTS.set(True)
    try:
        yield
    finally:
        JOINS_STATE_DICTS.reset(token)


@torch.no_grad()
def broadcast_initial_state(module: nn.Module, mesh: DeviceMesh) -> None:
    """Overwrite weights and buffers with those of the first rank of the mesh; ``fully_shard`` does not do it.

    Collective over ``mesh`` and over the mesh of every DTensor. A tensor that is not on the meta device becomes equal
    along all axes over which it is not sharded, also those of tensor parallelism.
    """
    tensors = [tensor for tensor in _state(module) if not tensor.is_meta]
    device = mesh_device(mesh)
    for axes in (axis_group(mesh, tuple(range(mesh.ndim))), *groups_beside(module, mesh)):
        if axes.group is not None:
            ranks = set(dist.get_process_group_ranks(axes.group))
            # Tensors that are not sharded over these ranks, so that each of them has a copy.
            copies = [t for t in tensors if not isinstance(t, DTensor) or _only_this_rank(t.device_mesh, ranks)]
            broadcast([local_tensor(tensor) for tensor in copies], axes.group, device)
    groups: dict[tuple[DeviceMesh, tuple[int, ...]], list[Tensor]] = {}
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            axes = tuple(axis for axis, placement in enumerate(tensor.placements) if placement.is_replicate())
            groups.setdefault((tensor.device_mesh, axes), []).append(tensor.to_local())
    for (own_mesh, axes), shards in groups.items():
        group = axis_group(own_mesh, axes).group if axes else None
        if group is not None:
            broadcast(shards, group, device)


def groups_beside(module: nn.Module, mesh: DeviceMesh) -> list[AxisGroup]:
    """The axes of tensor parallelism: those of the DTensors in ``module`` that share only this rank with ``mesh``."""
    found: dict[tuple[int, ...], AxisGroup] = {}
    for own_mesh in dict.fromkeys(tensor.device_mesh for tensor in _state(module) if isinstance(tensor, DTensor)):
        for axis in range(own_mesh.ndim):
            axes = axis_group(own_mesh, (axis,))
            if axes.group is not None:
                ranks = tuple(dist.get_process_group_ranks(axes.group))
                if _only_this_rank(mesh, set(ranks)):
                    found.setdefault(ranks, axes)
    return list(found.values())


def _only_this_rank(mesh: DeviceMesh, ranks: set[int]) -> bool:
    return ranks.intersection(mesh.mesh.flatten().tolist()) == {dist.get_rank()}


def _state(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers, each once."""
    return list(dict.fromkeys((*module.parameters(), *module.buffers())))


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """Return the device on which this rank takes part in the collectives of ``mesh``."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def broadcast(tensors: Sequence[Tensor], group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Overwrite tensors with those of the first rank, sent in buckets on ``device``. Collective over ``group``."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() > 0:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same_dtype in by_dtype.values():
        ends = accumulate(tensor.nbytes for tensor in same_dtype)
        for _, pairs in groupby(zip(same_dtype, ends, strict=True), key=lambda pair: pair[1] // _BUCKET_BYTES):
            bucket = [tensor for tensor, _ in pairs]
            flat = torch.cat([tensor.detach().to(device).reshape(-1) for tensor in bucket])
            # Send bytes, so that backends without complex, bool or float8 can send those, too.
            dist.broadcast(flat.view(torch.uint8), group=group, group_src=0)
            for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.detach().copy_(part.view(tensor.shape))


def names_of(module: nn.Module) -> dict[str, Tensor]:
    """First name of each parameter, without the parts that wrappers add -> parameter."""
    return {uses[0].name: uses[0].parameter for uses in parameter_uses(module)}


@torch.no_grad()
def broadcast_buffers(module: nn.Module, mesh: DeviceMesh | None = None) -> None:
    """Give all ranks the buffers of the first one, as DDP does. Collective over ``mesh``, by default over all ranks."""
    buffers = [buffer for buffer in module.buffers() if not isinstance(buffer, DTensor)]
    is_alone = (dist.get_world_size() if mesh is None else mesh.size()) == 1
    if buffers and not is_alone:
        group = None if mesh is None else axis_group(mesh, tuple(range(mesh.ndim))).group
        broadcast(buffers, group, buffers[0].device)
