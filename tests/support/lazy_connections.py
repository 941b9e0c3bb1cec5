"""A backend that opens its connections as NCCL does: at first use, and the host waits until all ranks have come.

``nccl_like_mesh`` gives a mesh whose groups use it, and all groups that the package makes for this mesh. The tensors
travel over gloo.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

NAME = "lazy"
# A rank that waits longer than this for a connection waits for ever.
SECONDS = 15.0
_COLLECTIVES = {
    name: name for name in ("allreduce", "allgather", "_allgather_base", "_reduce_scatter_base", "broadcast")
}
# As torch 2.13 calls them.
_COLLECTIVES |= {"all_gather_single": "_allgather_base", "reduce_scatter_single": "_reduce_scatter_base"}


class LazyGroup(dist.ProcessGroup):
    """Blocks at the first communication of the group, of each pair of ranks, and of each kind and size of collective.

    As NCCL, which makes the communicator, connects two ranks, and connects the ranks of an algorithm that it has
    chosen by the size of the message.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._store = dist.PrefixStore("lazy", store)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._connected: set[str] = set()
        self._name = ""

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802 - torch calls it
        return self._name

    def _get_backend(self, device: torch.device) -> Any:
        """Torch 2.14 asks it whether messages are sent together."""
        return self._gloo

    def alltoall_base(self, output: Any, given: Any, to: Sequence[int], source: Sequence[int], opts: Any) -> Any:
        self._connect_pairs(
            peer
            for peer in range(self.size())
            if (source[peer] if source else given.numel()) or (to[peer] if to else output.numel())
        )
        return self._gloo.alltoall_base(output, given, to, source, opts)

    def send(self, tensors: Any, peer: int, tag: int) -> Any:
        self._connect_pairs([peer])
        return self._gloo.send(tensors, peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int) -> Any:
        self._connect_pairs([peer])
        return self._gloo.recv(tensors, peer, tag)

    def collective(self, name: str, *args: Any) -> Any:
        """A communication of all ranks."""
        tensors = args[0] if args and isinstance(args[0], list) else [args[0]] if args else []
        size = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
        self._connect(f"{name} {size.bit_length() // 2}", self.size())
        return getattr(self._gloo, name)(*args)

    def _connect_pairs(self, peers: Iterable[int]) -> None:
        for peer in sorted(set(peers) - {self.rank()}):
            self._connect(f"pair {min(peer, self.rank())} {max(peer, self.rank())}", 2)

    def _connect(self, name: str, num_ranks: int) -> None:
        for key, count in (("communicator", self.size()), (name, num_ranks)):
            if key not in self._connected:
                self._connected.add(key)
                self._store.add(key, 1)
                deadline = time.monotonic() + SECONDS
                while self._store.add(key, 0) < count:
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"rank {self.rank()} waits for ever for the connection {key!r}")
                    time.sleep(0.001)


def _collective(name: str) -> Callable[..., Any]:
    return lambda group, *args: group.collective(name, *args)


for _name, _of_gloo in _COLLECTIVES.items():
    setattr(LazyGroup, _name, _collective(_of_gloo))


def nccl_like_mesh(*sizes: int) -> DeviceMesh:
    """A mesh over all ranks. Collective over the default group; every rank must call it."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, LazyGroup, devices=["cpu"])
    ranks = torch.arange(dist.get_world_size()).reshape(sizes)
    groups: list[dist.ProcessGroup] = []
    for axis in range(len(sizes)):
        for members in ranks.movedim(axis, -1).reshape(-1, sizes[axis]).tolist():
            group = dist.new_group(members, backend=NAME)
            if dist.get_rank() in members:
                groups.append(group)
    names = ("replicate", "shard")[-len(sizes) :]
    return DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=names)
