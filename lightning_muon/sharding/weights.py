"""Weights of all ranks: equal at the start, and whole on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_muon.comm.agreement import fail_together, require_equal
from lightning_muon.comm.groups import AxisGroup, axis_group
from lightning_muon.params.layout import local_tensor
from lightning_muon.params.uses import clean_name, parameter_uses
from lightning_muon.sharding.units import check_meta, describe_model

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


def replicate_model(module: nn.Module, mesh: DeviceMesh, name: str) -> None:
    """Give all ranks the weights and buffers of the first one, after all have found that they hold the same model.

    Collective over ``mesh``; every rank must call it.

    Args:
        module: Of plain tensors; those that are not contiguous become so.
        mesh: All data-parallel ranks.
        name: Of the mode, for messages.

    Raises:
        ValueError: If a parameter is a DTensor, or on the meta device.
        RuntimeError: If the ranks hold different models.
    """
    everyone = axis_group(mesh, tuple(range(mesh.ndim)))
    error: Exception | None = None
    try:
        check_meta(module)
        _check_plain(module, name)
    except ValueError as problem:
        error = problem
    if everyone.group is not None:
        fail_together(error, everyone.group)
        require_equal(describe_model(module, ()), everyone.group, f"the model {type(module).__name__}")
    elif error is not None:
        raise error
    for parameter in module.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    broadcast_initial_state(module, mesh)


def _check_plain(module: nn.Module, name: str) -> None:
    for parameter_name, parameter in names_of(module).items():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{parameter_name} {tuple(parameter.shape)} is a DTensor already, but sharding={name!r} keeps whole "
                "plain weights on every rank; remove fully_shard and parallelize_module from configure_model, or use "
                "sharding='fsdp'"
            )
        if parameter.is_meta:
            raise ValueError(f"{parameter_name} {tuple(parameter.shape)} is on the meta device; materialize it first")


def names_of(module: nn.Module) -> dict[str, Tensor]:
    """Each parameter by the first of its names, without the parts that wrappers add."""
    return {uses[0].name: uses[0].parameter for uses in parameter_uses(module)}


def full_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Whole weights and buffers on the CPU on rank 0, an empty dict elsewhere.

    Collective over all ranks of the mesh; every rank must call it. Names are those of the plain model, without what
    ``torch.compile`` adds; tied weights have all their names and one memory. A module without shards gives its ordinary
    state dict, in a program of several ranks on rank 0 only. As in ``Module.state_dict``, tensors that are whole and on
    the CPU already are not copied: clone them to keep them while training goes on.

    Example::

        state = lightning_muon.full_state_dict(model)  # on every rank
        if torch.distributed.get_rank() == 0:
            torch.save(state, "weights.pt")

    Args:
        module: A sharded model, one of its submodules, or a plain module. Do not pick a submodule with weights that are
            tied to others outside of it right after a forward pass without gradients: FSDP2 leaves such weights whole,
            in the dtype of the computation. (The strategy shards them again after each evaluation step.)
    """
    state = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    first_names: dict[int, str] = {}
    # After the gathering, because it turns weights that a forward pass has left whole into shards again.
    named = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    for name, tensor in ((clean_name(name), tensor) for name, tensor in named):
        if name in state:
            state[name] = state[first_names.setdefault(id(tensor), name)]
    return state  # type: ignore[return-value]


@torch.no_grad()
def broadcast_buffers(module: nn.Module) -> None:
    """Give all ranks the buffers of rank 0. Collective over all ranks; every rank must call it.

    Each rank updates running statistics from its own batches. DDP sends those of rank 0 before every forward pass;
    FSDP2 never does, and a checkpoint of shards would take each buffer from another rank.
    """
    if dist.get_world_size() == 1:
        return
    pending = []
    for buffer in module.buffers():
        if isinstance(buffer, DTensor) or buffer.numel() == 0:
            continue
        # Bytes travel: backends do not carry every dtype.
        payload = buffer.detach().contiguous().reshape(-1).view(torch.uint8)
        pending.append((buffer, payload, dist.broadcast(payload, src=0, async_op=True)))
    for buffer, payload, work in pending:
        work.wait()
        buffer.copy_(payload.view(buffer.dtype).view(buffer.shape))
