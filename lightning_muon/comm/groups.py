"""Process groups: over axes of a device mesh, of one owner alone, and on the host."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.compat.torch import new_group, world_timeout

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


def shard_axis(mesh: DeviceMesh) -> DeviceMesh:
    """The shard axis of a (replicate, shard) mesh: the ranks that share one copy of the weights; local."""
    if mesh.mesh_dim_names != ("replicate", "shard"):
        raise ValueError(
            "FlexDeMo takes a mesh with the axes ('replicate', 'shard') (nodes, ranks of a node), also for a single "
            f"node, got {mesh.ndim}-D with {mesh.mesh_dim_names}; make it with init_device_mesh(device_type, "
            "(num_nodes, ranks_per_node), mesh_dim_names=('replicate', 'shard'))"
        )
    return mesh["shard"]


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
