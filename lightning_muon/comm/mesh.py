"""Process groups over one or several axes of a device mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.comm.groups import Lease, MadeGroups


@dataclass(frozen=True)
class AxisGroup:
    """The ranks that differ from this one only along some axes of a mesh.

    Attributes:
        group: Process group of these ranks, ``None`` where this process is alone.
        rank: This process in the group.
        coordinates: Mesh coordinate of each rank of the group.
        lease: Keeps a private group from being given to others.
    """

    group: dist.ProcessGroup | None
    rank: int
    coordinates: tuple[tuple[int, ...], ...]
    lease: Lease | None = field(default=None, compare=False, repr=False)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.coordinates)

    def track(self, works: Sequence[dist.Work | None]) -> list[dist.Work]:
        """``works``, one communication that was begun over this group.

        A private group remembers it until it has been waited for. Ranks that have nothing to send or receive in a
        communication of the others call it, too.
        """
        begun = [work for work in works if work is not None]
        return begun if self.lease is None else self.lease.private.track(begun)


ALONE = AxisGroup(None, 0, ((),))


def axis_group(mesh: DeviceMesh, axes: tuple[int, ...]) -> AxisGroup:
    """Group over ``axes`` (indices) of ``mesh``.

    Collective over the ranks of the group the first time that a group over several axes is asked for; every one of
    them must call it.
    """
    # Found once: on a large mesh looking up the coordinates of all its ranks takes milliseconds.
    found = _made().axis_groups
    if (mesh, axes) not in found:
        found[mesh, axes] = _find_axis_group(mesh, axes)
    return found[mesh, axes]


def _find_axis_group(mesh: DeviceMesh, axes: tuple[int, ...]) -> AxisGroup:
    mine = mesh.get_coordinate()
    if mine is None:
        raise ValueError(f"rank {dist.get_rank()} is not part of the mesh {mesh} of its own parameters")
    index = tuple(slice(None) if axis in axes else mine[axis] for axis in range(mesh.ndim))
    ranks = tuple(sorted(mesh.mesh[index].flatten().tolist()))
    if len(ranks) == 1:
        return AxisGroup(None, 0, (tuple(mine),))
    group = mesh.get_group(axes[0])
    if len(axes) > 1:
        group = _group_of(ranks, str(dist.get_backend(group)))
    members = dist.get_process_group_ranks(group)
    coordinates = tuple(tuple((mesh.mesh == rank).nonzero()[0].tolist()) for rank in members)
    return AxisGroup(group, members.index(dist.get_rank()), coordinates)


def _group_of(ranks: tuple[int, ...], backend: str) -> dist.ProcessGroup:
    world = dist.group.WORLD
    if world is not None and ranks == tuple(range(world.size())) and backend == dist.get_backend(world):
        return world
    return _made().groups.share(ranks, backend)


class PrivateGroups:
    """Process groups that nobody else communicates over, one set for each optimizer.

    What is launched from hooks of the backward pass may fall between any two communications of FSDP2, and not between
    the same two on all ranks; so it must not share a group with them. An optimizer that makes a new plan keeps its
    groups. Once all that use them are gone on all ranks, and what was sent over them has arrived, another optimizer
    gets them.
    """

    def __init__(self) -> None:
        self._leases: dict[tuple[tuple[int, ...], int], Lease] = {}
        self._world: dist.ProcessGroup | None = None

    def of(self, groups: Sequence[AxisGroup]) -> list[AxisGroup]:
        """The same ranks with groups of this optimizer's, different ones also where the ranks are the same.

        All pairs of ranks are connected. Collective over each of ``groups``; every rank of it must call it, in the
        same order of groups.
        """
        if self._world is not dist.group.WORLD:
            self._leases, self._world = {}, dist.group.WORLD
        ordinals: Counter[tuple[int, ...]] = Counter()
        result: list[AxisGroup] = []
        for group in groups:
            if group.group is not None:
                ranks = tuple(dist.get_process_group_ranks(group.group))
                key = ranks, ordinals[ranks]
                ordinals[ranks] += 1
                if key not in self._leases:
                    self._leases[key] = _made().groups.lease(group.group)
                lease = self._leases[key]
                group = replace(group, group=lease.private.group, lease=lease)
            result.append(group)
        return result

    def among(self, group: AxisGroup, members: Sequence[int]) -> AxisGroup:
        """Some ranks of ``group``, the calling one among them, with a group of this optimizer's.

        Collective over them; every one of them must call it, in the same order of calls.

        Args:
            group: Any.
            members: Ranks in ``group``, ascending.
        """
        coordinates = tuple(group.coordinates[member] for member in members)
        place = members.index(group.rank)
        if len(members) == 1:
            return AxisGroup(None, place, coordinates)
        assert group.group is not None
        everyone = dist.get_process_group_ranks(group.group)
        shared = _group_of(tuple(everyone[member] for member in members), str(dist.get_backend(group.group)))
        return self.of([AxisGroup(shared, place, coordinates)])[0]


def host_group(group: AxisGroup) -> AxisGroup:
    """The same ranks with a gloo group, for tensors in the memory of the host.

    Collective over ``group`` the first time; every rank of it must call it.
    """
    if group.group is None:
        return group
    ranks = tuple(dist.get_process_group_ranks(group.group))
    return replace(group, group=_made().groups.share(ranks, "gloo"), lease=None)


@dataclass
class _Made:
    """Groups that were made or found in one world."""

    world: dist.ProcessGroup | None = None
    groups: MadeGroups = field(default_factory=MadeGroups)
    axis_groups: dict[tuple[DeviceMesh, tuple[int, ...]], AxisGroup] = field(default_factory=dict)


_CURRENT = _Made()


def _made() -> _Made:
    """What was made in the world of now. Groups of a destroyed one are let go: gloo's threads would spin for ever."""
    if _CURRENT.world is not dist.group.WORLD:
        _CURRENT.world = dist.group.WORLD
        _CURRENT.groups = MadeGroups()
        _CURRENT.axis_groups.clear()
    return _CURRENT
