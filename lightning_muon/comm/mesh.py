"""Process groups over one or several axes of a device mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.compat.torch import inherit_timeout


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
    group = mesh.get_group(axes[0]) if len(axes) == 1 else _group_of(ranks, dist.get_world_size())
    members = dist.get_process_group_ranks(group)
    coordinates = tuple(tuple((mesh.mesh == rank).nonzero()[0].tolist()) for rank in members)
    return AxisGroup(group, members.index(dist.get_rank()), coordinates)


class PrivateGroups:
    """Process groups that nobody else communicates over, one set for each optimizer.

    What is launched from hooks of the backward pass may fall between any two communications of FSDP2, and not between
    the same two on all ranks; so it must not share a group with them. Successive optimizers on the same ranks take
    turns among a few groups; an optimizer that makes a new plan keeps its own.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[dist.ProcessGroup | None, tuple[int, ...], int], int] = {}

    def of(self, groups: Sequence[AxisGroup]) -> list[AxisGroup]:
        """The same ranks with groups of this optimizer's, different ones also where the ranks are the same.

        Collective over each of ``groups``; every rank of it must call it, in the same order of groups.
        """
        ordinals: Counter[tuple[int, ...]] = Counter()
        result: list[AxisGroup] = []
        for group in groups:
            if group.group is not None:
                ranks = tuple(dist.get_process_group_ranks(group.group))
                number = self._number(ranks, ordinals[ranks])
                ordinals[ranks] += 1
                group = replace(group, group=_new_group(ranks, number))
            result.append(group)
        return result

    def among(self, group: AxisGroup, members: Sequence[int]) -> AxisGroup:
        """Some ranks of ``group``, the calling one among them, with a group of this optimizer's.

        Collective over them; every one of them must call it, in the same order of calls.

        Args:
            group: Any.
            members: Ranks in ``group``, ascending.
        """
        everyone = range(group.size) if group.group is None else dist.get_process_group_ranks(group.group)
        ranks = tuple(everyone[member] for member in members)
        coordinates = tuple(group.coordinates[member] for member in members)
        made = None if len(ranks) == 1 else _new_group(ranks, self._number(ranks, 0))
        return AxisGroup(made, members.index(group.rank), coordinates)

    def _number(self, ranks: tuple[int, ...], ordinal: int) -> int:
        key = dist.group.WORLD, ranks, ordinal
        if key not in self._numbers:
            turns = _made().turns
            self._numbers[key] = turns[ranks] % _NUM_PRIVATE_GROUPS
            turns[ranks] += 1
        return self._numbers[key]


# So many exchange groups of live optimizers may share their ranks.
_NUM_PRIVATE_GROUPS = 16


def host_group(group: AxisGroup) -> AxisGroup:
    """The same ranks with a gloo group, for tensors in the memory of the host.

    Collective over ``group`` the first time; every rank of it must call it.
    """
    if group.group is None:
        return group
    ranks = tuple(dist.get_process_group_ranks(group.group))
    return replace(group, group=_new_group(ranks, backend="gloo"))


def _group_of(ranks: tuple[int, ...], world_size: int) -> dist.ProcessGroup:
    if ranks == tuple(range(world_size)):
        return dist.group.WORLD  # type: ignore[return-value]
    return _new_group(ranks)


@dataclass
class _Made:
    """Groups that were made or found in one world, and how many private ones were asked for, by their ranks."""

    world: dist.ProcessGroup | None = None
    groups: dict[tuple[tuple[int, ...], int | None, str | None], dist.ProcessGroup] = field(default_factory=dict)
    turns: Counter[tuple[int, ...]] = field(default_factory=Counter)
    axis_groups: dict[tuple[DeviceMesh, tuple[int, ...]], AxisGroup] = field(default_factory=dict)


_CURRENT = _Made()


def _made() -> _Made:
    """What was made in the world of now. Groups of a destroyed one are let go: gloo's threads would spin for ever."""
    if _CURRENT.world is not dist.group.WORLD:
        _CURRENT.world = dist.group.WORLD
        _CURRENT.groups.clear()
        _CURRENT.turns.clear()
        _CURRENT.axis_groups.clear()
    return _CURRENT


def _new_group(ranks: tuple[int, ...], number: int | None = None, backend: str | None = None) -> dist.ProcessGroup:
    """A group of ``ranks``, made once."""
    groups = _made().groups
    key = ranks, number, backend
    if key not in groups:
        groups[key] = dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)
        inherit_timeout(groups[key])
    return groups[key]
