"""Process groups over axes of a device mesh; collectives and messages on packed buffers; copies to the host."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.compat.torch import let_gloo_finish_at_exit, new_group, world_timeout

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class AxisGroup:
    """The ranks that differ from this one only along some axes of a mesh."""

    group: dist.ProcessGroup | None  # `None` where this process is alone.
    rank: int  # This process in the group.
    coordinates: tuple[tuple[int, ...], ...]  # Mesh coordinate of each rank of the group.

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.coordinates)

    @property
    def ranks(self) -> Ranks:
        """Their global numbers; empty where there is no process group."""
        return () if self.group is None else tuple(dist.get_process_group_ranks(self.group))


ALONE = AxisGroup(None, 0, ((),))


class MadeGroups:
    """The groups that were made in one world, by their ranks and their backend."""

    def __init__(self, world: dist.ProcessGroup | None) -> None:
        self.world = world
        self.shared: dict[tuple[Ranks, str], dist.ProcessGroup] = {}
        self.axis_groups: dict[tuple[DeviceMesh, tuple[int, ...]], AxisGroup] = {}
        # Names must not be reused: a store keeps the addresses that the ranks of the first group have left there.
        self._counts: Counter[tuple[Ranks, str]] = Counter()

    def share(self, ranks: Ranks, backend: str) -> dist.ProcessGroup:
        """The shared group of ``ranks``, for uses where all ranks communicate the same in the same order.

        Collective over ``ranks`` the first time; every one of them must call it.
        """
        if (ranks, backend) not in self.shared:
            self.shared[ranks, backend] = self.make(ranks, backend)
        return self.shared[ranks, backend]

    def make(self, ranks: Ranks, backend: str) -> dist.ProcessGroup:
        """Make a new group by its members alone: other ranks may have other parameters, and so other meshes."""
        if backend == "mpi":
            raise ValueError("MPI makes no group without all other ranks; initialize with gloo or nccl")
        digest = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
        name = f"lightning_muon:{backend}:{digest}:{self._counts[ranks, backend]}"
        self._counts[ranks, backend] += 1
        return new_group(ranks, name, backend=backend, timeout=world_timeout())


_CURRENT = [MadeGroups(None)]


def _made() -> MadeGroups:
    """The groups of the current world. Those of a destroyed one are dropped: gloo's threads would spin for ever."""
    if _CURRENT[0].world is not dist.group.WORLD:
        _CURRENT[0] = MadeGroups(dist.group.WORLD)
    return _CURRENT[0]


def backends(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Type of device -> name of the backend that moves its tensors; local."""
    return dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))


def axis_group(mesh: DeviceMesh, axes: tuple[int, ...]) -> AxisGroup:
    """Group over ``axes`` of ``mesh``. Collective over it the first time if it has several."""
    # Cached: on a large mesh looking up the coordinates of all its ranks takes milliseconds.
    found = _made().axis_groups
    if (mesh, axes) in found:
        return found[mesh, axes]
    mine = mesh.get_coordinate()
    if mine is None:
        raise ValueError(f"rank {dist.get_rank()} is not part of the mesh {mesh} of its own parameters")
    index = tuple(slice(None) if axis in axes else mine[axis] for axis in range(mesh.ndim))
    ranks = tuple(sorted(mesh.mesh[index].flatten().tolist()))
    if len(ranks) == 1:
        result = AxisGroup(None, 0, (tuple(mine),))
    else:
        group = mesh.get_group(axes[0])
        if len(axes) > 1:
            backend = str(dist.get_backend(group))
            is_world = ranks == tuple(range(dist.get_world_size())) and backend == dist.get_backend()
            group = dist.group.WORLD if is_world else _made().share(ranks, backend)
        members = dist.get_process_group_ranks(group)
        coordinates = tuple(tuple((mesh.mesh == rank).nonzero()[0].tolist()) for rank in members)
        result = AxisGroup(group, members.index(dist.get_rank()), coordinates)
    found[mesh, axes] = result
    return result


def host_group(group: AxisGroup) -> AxisGroup:
    """The same ranks with a gloo group, for tensors in host memory. Collective over ``group`` the first time."""
    if group.group is None:
        return group
    return replace(group, group=_made().share(group.ranks, "gloo"))


def own_group(group: AxisGroup) -> AxisGroup:
    """The same ranks with a new process group, for what hooks of a backward pass or a thread begin.

    It may begin between any two communications of the program, not the same two on all ranks, and ranks must begin what
    goes over one process group in one order. Collective over ``group``.
    """
    if group.group is None:
        return group
    return replace(group, group=_made().make(group.ranks, str(dist.get_backend(group.group))))


def all_ranks() -> AxisGroup:
    """All ranks of the program, or this one alone; local."""
    ranks = range(dist.get_world_size()) if dist.is_initialized() else (0,)
    is_alone = len(ranks) == 1
    group = None if is_alone else dist.group.WORLD
    return AxisGroup(group, 0 if is_alone else dist.get_rank(), tuple((rank,) for rank in ranks))


# Each is called for every communication that begins here, with its group and the bytes that this rank sends to each
# other rank of it. Empty unless something measures.
observers: list[Callable[[AxisGroup, Mapping[int, int]], None]] = []


def make_buckets(parameters: Sequence[Tensor], bucket_bytes: int) -> list[tuple[Tensor, ...]]:
    """Buckets of one dtype and device, at most ``bucket_bytes`` or one parameter large, in the order of backward.

    The order of backward is the reverse of the given order, which is that of the modules.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    current: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    groups: list[list[int]] = []
    for index in reversed(range(len(parameters))):
        key, size = (parameters[index].dtype, parameters[index].device), parameters[index].nbytes
        if key not in current or sizes[key] + size > bucket_bytes:
            current[key], sizes[key] = [], 0
            groups.append(current[key])
        current[key].append(index)
        sizes[key] += size
    groups.sort(key=lambda group: -group[-1])
    return [tuple(parameters[index] for index in group) for group in groups]


class BufferPool:
    """Flat buffers by name, as large as the largest use of a name that is known when one is taken."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._sizes, self._buffers = Counter[str](), dict[str, Tensor]()

    def reserve(self, name: str, numel: int) -> None:
        """Announce a use."""
        self._sizes[name] = max(self._sizes[name], numel)

    def take(self, name: str, numel: int) -> Tensor:
        """The first ``numel`` elements of the buffer; the same name gives the same memory, unless it had to grow."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < numel:
            buffer = torch.empty(self._sizes[name], dtype=self.dtype, device=self.device)
            self._buffers[name] = buffer
        return buffer[:numel]


def start_all_to_all(
    send: Tensor, to: Sequence[int], receive: Tensor, source: Sequence[int], group: AxisGroup
) -> list[dist.Work]:
    """Begin an uneven all-to-all; wait for the handles before the 1-D buffers are read or filled again.

    ``to`` and ``source`` are the elements for and from each rank, of which the buffers consist in this order.
    Collective over ``group``, also one that sends and receives nothing.
    """
    let_gloo_finish_at_exit()
    if observers:
        _tell(group, {rank: numel * send.element_size() for rank, numel in enumerate(to) if rank != group.rank})
    work = dist.all_to_all_single(receive, send, list(source), list(to), group=group.group, async_op=True)
    return [] if work is None else [work]


def start_messages(send: Mapping[int, Tensor], receive: Mapping[int, Tensor], group: AxisGroup) -> list[dist.Work]:
    """Begin one message of a contiguous tensor for each pair of ranks; several may send the same memory.

    Every rank of ``group`` that is named by another must call this, in the same order of calls. Raises ``ValueError``
    for tensors on CUDA over gloo, which would read their addresses as ones of the host.
    """
    is_on_card = any(tensor.is_cuda for tensor in (*send.values(), *receive.values()))
    if is_on_card and backends(group.group).get("cuda") == "gloo":
        raise ValueError("gloo cannot send tensors on CUDA from one rank to another; use NCCL")
    let_gloo_finish_at_exit()
    if observers:
        _tell(group, {rank: tensor.nbytes for rank, tensor in send.items()})
    messages = [
        *(dist.P2POp(dist.irecv, tensor, group=group.group, group_peer=rank) for rank, tensor in receive.items()),
        *(dist.P2POp(dist.isend, tensor, group=group.group, group_peer=rank) for rank, tensor in send.items()),
    ]
    return dist.batch_isend_irecv(messages) if messages else []


def _tell(group: AxisGroup, sent: Mapping[int, int]) -> None:
    for observer in observers:
        observer(group, sent)


def start_all_reduce_sum(values: Tensor, group: AxisGroup) -> dist.Work:
    """Begin the elementwise sum, in place. Collective over ``group``."""
    let_gloo_finish_at_exit()
    if observers:  # As a ring moves them: each rank sends to the next one.
        num_bytes = 2 * (group.size - 1) * values.nbytes // group.size
        _tell(group, {(group.rank + 1) % group.size: num_bytes})
    work = dist.all_reduce(values, group=group.group, async_op=True)
    assert work is not None
    return work


def start_reading(tensors: Sequence[Tensor]) -> Callable[[], list[list[Any]]]:
    """Begin to copy small tensors of any dtypes and devices to the host; the result gives the elements of each, flat.

    Calling the result waits for work queued on a device before this call, not for work queued afterwards. Local.
    """
    copies = [_start_copy(tensor.detach().reshape(-1)) for tensor in tensors]
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def read() -> list[list[Any]]:
        for event in events:
            event.synchronize()
        return [copy.tolist() for copy in copies]

    return read


def _start_copy(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
