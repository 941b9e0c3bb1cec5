"""Collectives and messages on packed buffers, and copies of small results to the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_muon.comm.groups import AxisGroup, backends
from lightning_muon.compat.torch import let_gloo_finish_at_exit

# Each is called for every communication that begins here, with its group and the bytes that this rank sends to each
# other rank of it. Empty unless something measures.
observers: list[Callable[[AxisGroup, Mapping[int, int]], None]] = []


@dataclass(frozen=True)
class PeerSplits:
    """The tensors that lie in one buffer: all for peer 0, then those for peer 1, ..."""

    shapes: tuple[tuple[int, ...], ...]
    splits: tuple[int, ...]  # Elements for each peer.

    @property
    def numel(self) -> int:
        """Elements of the buffer."""
        return sum(self.splits)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """One view per tensor, in its own shape."""
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        flat = buffer[: self.numel].split(sizes)
        return [part.view(shape) for part, shape in zip(flat, self.shapes, strict=True)]

    def by_peer(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """One flat view per peer, of all its tensors."""
        return buffer[: self.numel].split(list(self.splits))


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
    """Flat buffers by name, grown on demand and kept."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, numel: int) -> Tensor:
        """A buffer of at least ``numel`` elements; the same name gives the same memory."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < numel:
            buffer = torch.empty(numel, dtype=self.dtype, device=self.device)
            self._buffers[name] = buffer
        return buffer


def start_all_to_all(
    send: Tensor, to: Sequence[int], receive: Tensor, source: Sequence[int], group: AxisGroup
) -> list[dist.Work]:
    """Begin an uneven all-to-all; wait for the handles before the 1-D buffers are read or filled again.

    ``to`` and ``source`` are the elements for and from each rank, which lie in this order at the beginning of the
    buffers. Collective over ``group``, also one that sends and receives nothing.
    """
    let_gloo_finish_at_exit()
    out, into = send[: sum(to)], receive[: sum(source)]
    if observers:
        _tell(group, {rank: numel * send.element_size() for rank, numel in enumerate(to) if rank != group.rank})
    work = dist.all_to_all_single(into, out, list(source), list(to), group=group.group, async_op=True)
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
