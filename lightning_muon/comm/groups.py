"""Process groups beside those of the user: their names, who makes them, and what they must be able to do."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.comm.agreement import gather
from lightning_muon.compat.torch import new_group, world_timeout

Ranks = tuple[int, ...]


class Launched(dist.Work):
    """A communication over a private group, which is remembered until it has been waited for."""

    def __init__(self, work: dist.Work, in_flight: dict[Launched, None]) -> None:
        super().__init__()
        self._work, self._in_flight = work, in_flight
        in_flight[self] = None

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would not wait; ``False`` if that is not known."""
        return self._work.is_completed()

    def wait(self) -> bool:  # type: ignore[override]
        """As in torch."""
        result = self._work.wait()
        self._in_flight.pop(self, None)
        return result

    def get_future(self) -> torch.futures.Future[Any]:  # type: ignore[override]
        """As in torch."""
        return self._work.get_future()


@dataclass(eq=False)
class PrivateGroup:
    """A process group over which one owner at a time communicates.

    Attributes:
        group: The process group.
        is_free: Whether this rank has no owner for it.
        num_launched: Communications that this rank has begun; messages that are begun together count once.
        in_flight: Those that nobody has waited for, in their order. An owner may be thrown away before it does; the
            handles must outlive it, because gloo gives a message whose handle is gone to the next one that is
            received, or ends the process if the sizes differ.
    """

    group: dist.ProcessGroup
    is_free: bool = True
    num_launched: int = 0
    in_flight: dict[Launched, None] = field(default_factory=dict[Launched, None])

    def track(self, works: Sequence[dist.Work]) -> list[dist.Work]:
        """``works``, one communication that has just been begun over this group, as handles that are remembered."""
        self.num_launched += 1
        return [Launched(work, self.in_flight) for work in works]

    def settle(self) -> bool:
        """Wait for all that is in flight; ``False`` if that fails. The other ranks must have launched the same."""
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


@dataclass
class MadeGroups:
    """The groups that were made in one world, by their ranks and their backend."""

    shared: dict[tuple[Ranks, str], dist.ProcessGroup] = field(
        default_factory=dict[tuple[Ranks, str], dist.ProcessGroup]
    )
    private: dict[tuple[Ranks, str], list[PrivateGroup]] = field(
        default_factory=dict[tuple[Ranks, str], list[PrivateGroup]]
    )
    # Names must not come back: a store keeps the addresses that the ranks of the first group have left there.
    counts: Counter[tuple[Ranks, str]] = field(default_factory=Counter[tuple[Ranks, str]])

    def share(self, ranks: Ranks, backend: str) -> dist.ProcessGroup:
        """The group of ``ranks`` that everybody may use where all ranks do the same in the same order.

        Collective over ``ranks`` the first time; every one of them must call it.
        """
        if (ranks, backend) not in self.shared:
            self.shared[ranks, backend] = self._make(ranks, backend)
        return self.shared[ranks, backend]

    def lease(self, base: dist.ProcessGroup) -> Lease:
        """A group of the same ranks and with the same backend as ``base`` that nobody else has now.

        All pairs of its ranks are connected. Collective over ``base``; every rank of it must call it.
        """
        ranks, backend = tuple(dist.get_process_group_ranks(base)), str(dist.get_backend(base))
        made = self.private.setdefault((ranks, backend), [])
        found = _unused(made, base) if made else None
        if found is None:
            found = PrivateGroup(self._make(ranks, backend))
            made.append(found)
            _connect(found.group)
        return Lease(found)

    def _make(self, ranks: Ranks, backend: str) -> dist.ProcessGroup:
        """A new group. Its members alone make it: ranks may own different parameters, and so belong to other meshes.

        The number in its name counts the groups of just these ranks, which all of them have made in the same order.
        """
        if backend == "mpi":
            raise ValueError("MPI makes no group without all other ranks; initialize with gloo or nccl")
        digest = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
        name = f"lightning_muon:{backend}:{digest}:{self.counts[ranks, backend]}"
        self.counts[ranks, backend] += 1
        return new_group(ranks, name, backend=backend, timeout=world_timeout())


def backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Type of device -> name of the backend that moves its tensors; local."""
    return dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))


def require_backend(mesh: DeviceMesh, device: torch.device, what: str) -> None:
    """Raise ``ValueError`` if tensors on ``device`` cannot travel over ``mesh``; local.

    Args:
        mesh: Of the tensors.
        device: Where they are.
        what: Begins the message, for example the name of a parameter.
    """
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            known = backends(mesh.get_group(axis))
            if device.type not in known:
                named = ",".join(f"{kind}:{backend}" for kind, backend in known.items())
                wanted = f"{device.type}:gloo,{named}"
                raise ValueError(
                    f"{what} in {device.type} memory (CPUOffloadPolicy), but the process groups of its mesh are made "
                    f"with {named!r} and cannot send it. Use process_group_backend={wanted!r} in the strategy, or "
                    f"init_process_group({wanted!r})"
                )


def _unused(made: Sequence[PrivateGroup], base: dist.ProcessGroup) -> PrivateGroup | None:
    """One of the groups that has no owner on any rank, and in which nothing is left over.

    Collective over ``base``; every rank of it must call it, with the groups in the same order. Where ranks have
    launched equally much, all of it arrives and is waited for. Where they have not, nobody may use the group again.
    """
    free = {number: private.num_launched for number, private in enumerate(made) if private.is_free}
    everyone = gather(free, base)
    for number, count in free.items():
        if all(other.get(number) == count for other in everyone):
            if all(gather(made[number].settle(), base)):
                return made[number]
            made[number].is_free = False
    return None


def _connect(group: dist.ProcessGroup) -> None:
    """Have the ranks open the connection of each pair of them.

    Collective over ``group``; every rank must call it. NCCL connects two ranks when they communicate for the first
    time, and keeps the host waiting until both have come. What is launched by hooks of the backward pass is launched by
    some ranks earlier than by others, which may wait for them in another place. Sums over all ranks, for which NCCL
    opens connections by size, are not sent by hooks before all ranks have sent the like; see GradientReducer.
    """
    size = dist.get_world_size(group)
    for device, backend in backends(group).items():
        # gloo connects all pairs when the group is made, and waits in threads of its own.
        if backend in ("gloo", "fake") or not (device == "cpu" or torch.get_device_module(device).is_available()):
            continue
        ones = torch.ones(size, device=device)
        dist.all_to_all_single(torch.empty_like(ones), ones, group=group)
