"""Process groups: over axes of a device mesh, private to one owner, and on the host."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_muon.comm.agreement import gather
from lightning_muon.compat.torch import new_group, world_timeout

Ranks = tuple[int, ...]


class Launched(dist.Work):
    """A communication over a private group, which the group keeps until it has been waited for."""

    def __init__(self, work: dist.Work, in_flight: dict[Launched, None]) -> None:
        super().__init__()
        self._work, self._in_flight = work, in_flight
        in_flight[self] = None

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return at once; ``False`` if that is not known."""
        return self._work.is_completed()

    @override
    def wait(self) -> bool:
        result = self._work.wait()
        self._in_flight.pop(self, None)
        return result

    @override
    def get_future(self) -> torch.futures.Future[Any]:
        return self._work.get_future()


@dataclass(eq=False)
class PrivateGroup:
    """A process group over which one owner at a time communicates."""

    group: dist.ProcessGroup
    is_free: bool = True  # Whether this rank has no owner for it.
    num_launched: int = 0  # Communications that this rank has begun; messages that are begun together count once.
    # Communications that nobody has waited for, in order. They must outlive an owner that is deleted: gloo delivers a
    # message whose handle is gone to the next receive, or ends the process if the sizes differ.
    in_flight: dict[Launched, None] = field(default_factory=dict[Launched, None])

    def wait_for_sent(self) -> bool:
        """Wait for all that is in flight; return ``False`` if that fails. All ranks must have launched the same."""
        try:
            for launched in list(self.in_flight):
                launched.wait()
        except RuntimeError:  # Another rank was too late, or is gone.
            return False
        return True


class Lease:
    """The right to communicate over a private group, as long as this object lives."""

    def __init__(self, private: PrivateGroup) -> None:
        self.private = private
        private.is_free = False

    def __del__(self) -> None:
        self.private.is_free = True


@dataclass(frozen=True)
class AxisGroup:
    """The ranks that differ from this one only along some axes of a mesh."""

    group: dist.ProcessGroup | None  # `None` where this process is alone.
    rank: int  # This process in the group.
    coordinates: tuple[tuple[int, ...], ...]  # Mesh coordinate of each rank of the group.
    # Keeps a private group from being given to others.
    lease: Lease | None = field(default=None, compare=False, repr=False)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.coordinates)

    def track(self, works: Sequence[dist.Work | None]) -> list[dist.Work]:
        """Count one communication over this group, and return its handles; a private group keeps them until waited for.

        ``works`` is empty if only other ranks communicate.
        """
        begun = [work for work in works if work is not None]
        if self.lease is None:
            return begun
        private = self.lease.private
        private.num_launched += 1
        return [Launched(work, private.in_flight) for work in begun]


ALONE = AxisGroup(None, 0, ((),))


class MadeGroups:
    """The groups that were made in one world, by their ranks and their backend."""

    def __init__(self, world: dist.ProcessGroup | None) -> None:
        self.world = world
        self.shared: dict[tuple[Ranks, str], dist.ProcessGroup] = {}
        self.private: dict[tuple[Ranks, str], list[PrivateGroup]] = {}
        self.axis_groups: dict[tuple[DeviceMesh, tuple[int, ...]], AxisGroup] = {}
        # Names must not be reused: a store keeps the addresses that the ranks of the first group have left there.
        self._counts: Counter[tuple[Ranks, str]] = Counter()

    def share(self, ranks: Ranks, backend: str) -> dist.ProcessGroup:
        """The shared group of ``ranks``, for uses where all ranks communicate the same in the same order.

        Collective over ``ranks`` the first time; every one of them must call it.
        """
        if (ranks, backend) not in self.shared:
            self.shared[ranks, backend] = self._make(ranks, backend)
        return self.shared[ranks, backend]

    def lease(self, base: AxisGroup) -> Lease:
        """Lease a group with the ranks and backend of ``base`` that no other owner has.

        All pairs of its ranks are connected. Collective over ``base``; every rank of it must call it.
        """
        # A group without an owner on any rank is reused if all ranks have launched equally many and all complete.
        ranks, backend = tuple(dist.get_process_group_ranks(base.group)), str(dist.get_backend(base.group))
        made = self.private.setdefault((ranks, backend), [])
        free = {number: private.num_launched for number, private in enumerate(made) if private.is_free}
        everyone = gather(free, base) if made else []
        for number, count in free.items():
            if all(other.get(number) == count for other in everyone):
                if all(gather(made[number].wait_for_sent(), base)):
                    return Lease(made[number])
                made[number].is_free = False
        made.append(PrivateGroup(self._make(ranks, backend)))
        _connect(made[-1].group)
        return Lease(made[-1])

    def _make(self, ranks: Ranks, backend: str) -> dist.ProcessGroup:
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


def _connect(group: dist.ProcessGroup) -> None:
    """Open the connections between all pairs of ranks. Collective over ``group``; every rank must call it.

    Else NCCL does it when two ranks communicate for the first time, and the host waits for both: a hook of the backward
    pass would wait for a rank that waits in another place.
    """
    size = dist.get_world_size(group)
    for device, backend in backends(group).items():
        # gloo connects all pairs when the group is made, and waits in threads of its own.
        if backend in ("gloo", "fake") or not (device == "cpu" or torch.get_device_module(device).is_available()):
            continue
        ones = torch.ones(size, device=device)
        dist.all_to_all_single(torch.empty_like(ones), ones, group=group)


def backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Type of device -> name of the backend that moves its tensors; local."""
    return dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))


def require_backend(mesh: DeviceMesh, device: torch.device, what: str) -> None:
    """Raise ``ValueError``, which begins with ``what``, if ``mesh`` cannot send tensors on ``device``; local."""
    for axis in range(mesh.ndim):
        known = backends(mesh.get_group(axis))
        if mesh.size(axis) > 1 and device.type not in known:
            named = ",".join(f"{kind}:{backend}" for kind, backend in known.items())
            wanted = f"{device.type}:gloo,{named}"
            raise ValueError(
                f"{what} in {device.type} memory (CPUOffloadPolicy), but the process groups of its mesh are made "
                f"with {named!r} and cannot send it. Use process_group_backend={wanted!r} in the strategy, or "
                f"init_process_group({wanted!r})"
            )


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
    """Group over ``axes`` of ``mesh``. Collective over it the first time if it has several; all ranks must call it."""
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
            group = _group_of(ranks, str(dist.get_backend(group)))
        members = dist.get_process_group_ranks(group)
        coordinates = tuple(tuple((mesh.mesh == rank).nonzero()[0].tolist()) for rank in members)
        result = AxisGroup(group, members.index(dist.get_rank()), coordinates)
    found[mesh, axes] = result
    return result


def _group_of(ranks: Ranks, backend: str) -> dist.ProcessGroup:
    world = dist.group.WORLD
    if world is not None and ranks == tuple(range(world.size())) and backend == dist.get_backend(world):
        return world
    return _made().share(ranks, backend)


def host_group(group: AxisGroup) -> AxisGroup:
    """The same ranks with a gloo group, for tensors in host memory.

    Collective over ``group`` the first time; every rank of it must call it.
    """
    if group.group is None:
        return group
    ranks = tuple(dist.get_process_group_ranks(group.group))
    return replace(group, group=_made().share(ranks, "gloo"), lease=None)


class PrivateGroups:
    """Process groups over which only one owner, such as an optimizer, communicates; it keeps them for new plans.

    A communication from a hook of the backward pass may begin between any two communications of FSDP2, not the same two
    on all ranks, so it must not share a group with them.
    """

    def __init__(self) -> None:
        self._leases: dict[tuple[Ranks, int], Lease] = {}
        self._world: dist.ProcessGroup | None = None

    def of(self, groups: Sequence[AxisGroup]) -> list[AxisGroup]:
        """The same ranks with connected private groups, different ones for each entry, also if the ranks are the same.

        Collective over each of ``groups``; every rank of it must call it, in the same order of groups.
        """
        if self._world is not dist.group.WORLD:
            self._leases, self._world = {}, dist.group.WORLD
        ordinals: Counter[Ranks] = Counter()
        result: list[AxisGroup] = []
        for group in groups:
            if group.group is not None:
                ranks = tuple(dist.get_process_group_ranks(group.group))
                key = ranks, ordinals[ranks]
                ordinals[ranks] += 1
                if key not in self._leases:
                    self._leases[key] = _made().lease(group)
                lease = self._leases[key]
                group = replace(group, group=lease.private.group, lease=lease)
            result.append(group)
        return result

    def of_everyone(self) -> AxisGroup:
        """A private gloo group of all ranks, for a thread. Collective over all ranks; all must call it."""
        ranks = tuple(range(dist.get_world_size()))
        shared = _made().share(ranks, "gloo")
        return self.of([AxisGroup(shared, dist.get_rank(), tuple((rank,) for rank in ranks))])[0]
