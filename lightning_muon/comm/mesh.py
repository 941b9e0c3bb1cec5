"""Process groups over one or several axes of a device mesh."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class AxisGroup:
    """The ranks that differ from this one only along some axes of a mesh.

    Attributes:
        group: Process group of these ranks, ``None`` where this process is alone.
        rank: This process in the group.
        coordinates: Mesh coordinate of each rank of the group.
    """

    group: dist.ProcessGroup | None
    rank: int
    coordinates: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.coordinates)


ALONE = AxisGroup(None, 0, ((),))


def axis_group(mesh: DeviceMesh, axes: tuple[int, ...]) -> AxisGroup:
    """Group over ``axes`` (indices) of ``mesh``.

    Collective over the ranks of the group the first time that a group over several axes is asked for; every one of
    them must call it.
    """
    mine = mesh.get_coordinate()
    if mine is None:
        raise ValueError(f"rank {dist.get_rank()} is not part of the mesh {mesh} of its own parameters")
    index = tuple(slice(None) if axis in axes else mine[axis] for axis in range(mesh.ndim))
    ranks = tuple(sorted(mesh.mesh[index].flatten().tolist()))
    if len(ranks) == 1:
        return AxisGroup(None, 0, (tuple(mine),))
    group = mesh.get_group(axes[0]) if len(axes) == 1 else _group_of(ranks, dist.get_world_size())
    members = dist.get_process_group_ranks(group)
    coordinates = tuple(tuple((mesh.mesh == rank).nonzero()[0].tolist()) for rank in members)
    return AxisGroup(group, members.index(dist.get_rank()), coordinates)


def _group_of(ranks: tuple[int, ...], world_size: int) -> dist.ProcessGroup:
    if ranks == tuple(range(world_size)):
        return dist.group.WORLD  # type: ignore[return-value]
    return _new_group(ranks, dist.group.WORLD)  # type: ignore[arg-type]


@lru_cache(maxsize=64)
def _new_group(ranks: tuple[int, ...], world: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of ``ranks``; cached by the world, so that a destroyed and rebuilt default group makes a new one."""
    del world
    return dist.new_group(list(ranks), use_local_synchronization=True)
