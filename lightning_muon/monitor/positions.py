"""Where a rank stands while it makes no progress, whether its process lives, and what the positions of all prove."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path

import torch.distributed as dist

from lightning_muon.compat.torch import collective_counts
from lightning_muon.sharding.fsdp_call_log import FsdpCallLog

_TORCH_DISTRIBUTED = os.path.join("torch", "distributed") + os.sep


@dataclass(frozen=True, kw_only=True)
class Position:
    """What one rank publishes."""

    step: int  # Steps and evaluations that this rank has ended.
    shard: int  # The lowest rank with which it shares the weights.
    mesh: int  # The lowest rank with which it shares gradients.
    skipped: int  # Number of calls of this step that are left out, the first ones; ranks further apart prove nothing.
    calls: list[int]  # The other calls of `FsdpCallLog`.
    crossing_skipped: int  # As `skipped`, of the calls that all ranks have in common.
    crossing: list[int]  # These calls.
    # Name of the process group in whose collective the rank waits, `None` if it does something else. A barrier of the
    # call log counts as a group of its own.
    group: str | None
    counts: dict[str, int]  # Collectives launched in each process group.
    beat: int = 0  # How often the rank has looked since it last got on.
    left: bool = False  # Whether the rank has ended its run.
    failure: str | None = None  # The exception that ended the step of this rank.

    @classmethod
    def current(
        cls, call_log: FsdpCallLog, thread: int, *, beat: int, left: bool = False, failure: str | None = None
    ) -> Position:
        """The position of this process, whose ``thread`` trains; local."""
        skipped, calls = call_log.all_calls.tail()
        crossing_skipped, crossing = call_log.crossing.tail()
        place = waiting_place(thread)
        return cls(
            step=call_log.step,
            shard=call_log.shard_ranks[0],
            mesh=call_log.ranks[0],
            skipped=skipped,
            calls=calls,
            crossing_skipped=crossing_skipped,
            crossing=crossing,
            group=None if place is None else place[0],
            counts=collective_counts(),
            beat=beat,
            left=left,
            failure=failure,
        )

    def with_barriers(self, counts: Mapping[str, int], waits_in: str | None) -> Position:
        """Add to how many barriers of each name the rank has come, and the one in which it waits."""
        return replace(self, group=waits_in or self.group, counts={**self.counts, **counts})

    def to_text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Position:
        """The inverse of :meth:`to_text`."""
        return cls(**json.loads(text))


def waiting_place(thread: int) -> tuple[str, int] | None:
    """The collective of torch.distributed in which a thread is: (name of its group, identity of the call)."""
    frame = sys._current_frames().get(thread)
    if frame is None or _TORCH_DISTRIBUTED not in frame.f_code.co_filename:
        return None
    known = frame.f_locals
    if "group" not in known and "pg" not in known:
        return None
    group = known.get("group") or known.get("pg") or dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        return None
    try:
        return group.group_name, id(frame)
    except RuntimeError:  # It is being made, and has no name yet.
        return None


def find_mismatch(positions: Mapping[int, Position], call_log: FsdpCallLog) -> str | None:
    """The reason why these ranks can never meet, ``None`` if they may.

    Args:
        positions: Global rank -> what it has published; ranks that get on have published nothing, or something old.
        call_log: Names the units.
    """
    differing = _different_calls(positions, call_log)
    if differing is not None:
        return differing
    for (first, a), (second, b) in combinations(sorted(positions.items()), 2):
        if _never_meet(a, b):
            places = f"rank {first} {_place(a, call_log)}, rank {second} {_place(b, call_log)}"
            calls = [position.calls[-1] for position in (a, b) if position.calls]
            return f"The ranks wait for each other in different places: {places}. {call_log.advice(calls)}"
    return None


def _different_calls(positions: Mapping[int, Position], call_log: FsdpCallLog) -> str | None:
    """Compare the calls of ranks in the same step: all of them inside each shard group, others over each mesh."""
    compared: dict[tuple[int, bool, int], dict[int, tuple[int, list[int]]]] = {}
    for rank, position in positions.items():
        own = compared.setdefault((position.step, False, position.shard), {})
        own[rank] = position.skipped, position.calls
        everyone = compared.setdefault((position.step, True, position.mesh), {})
        everyone[rank] = position.crossing_skipped, position.crossing
    # The calls of a shard group say more.
    for _, tails in sorted(compared.items(), key=lambda item: item[0][1]):
        found = call_log.describe(tails, complete=False)
        if found is not None:
            return found
    return None


def _never_meet(a: Position, b: Position) -> bool:
    """Whether each waits for something that the other will not launch before it.

    A rank waits in the last collective that it has launched in that group. Being ahead in one group proves nothing:
    the other may be slow.
    """
    if a.group is None or b.group is None or a.step != b.step or min(a.beat, b.beat) < 2:
        return False
    if a.group == b.group:
        same_collective = a.counts.get(a.group) == b.counts.get(a.group)
        return same_collective and _ends_differ(a, b)
    in_both = all(group in position.counts for group in (a.group, b.group) for position in (a, b))
    return in_both and b.counts[a.group] < a.counts[a.group] and a.counts[b.group] < b.counts[b.group]


def _ends_differ(a: Position, b: Position) -> bool:
    """Whether the ranks have noted differently much of what they must have in common."""
    if a.shard == b.shard:
        return a.skipped + len(a.calls) != b.skipped + len(b.calls)
    if a.mesh != b.mesh:
        return False
    return a.crossing_skipped + len(a.crossing) != b.crossing_skipped + len(b.crossing)


def _place(position: Position, call_log: FsdpCallLog) -> str:
    last = call_log.text(position.calls[-1]) if position.calls else "has run no unit in this step"
    return f"waits after it {last}" if position.calls else last


@dataclass(frozen=True)
class ProcessIdentity:
    """A process that others on the same host can look up."""

    host: str  # The running kernel and the namespace of process numbers; empty where the system does not tell them.
    pid: int  # Number of the process in that namespace.
    start: str  # When it was started, in ticks since the kernel was; tells it from a later process of the same number.

    @classmethod
    def current(cls) -> ProcessIdentity:
        """The calling process."""
        pid = os.getpid()
        _, start = _state_and_start(pid)
        return cls(_host() if start else "", pid, start)

    @classmethod
    def from_text(cls, text: str) -> ProcessIdentity:
        """The inverse of :meth:`to_text`."""
        host, pid, start = text.split(" ")
        return cls(host, int(pid), start)

    def to_text(self) -> str:
        """For the other ranks."""
        return f"{self.host} {self.pid} {self.start}"

    @property
    def is_on_this_host(self) -> bool:
        """Whether :meth:`is_gone` can tell. Never where the system has no ``/proc``."""
        return self.host != "" and self.host == _host()

    def is_gone(self) -> bool:
        """Whether the process, one of this host, has ended."""
        state, start = _state_and_start(self.pid)
        # Z and X: it has ended, and its parent has not asked for its exit code yet.
        return start != self.start or state in ("Z", "X")


def _host() -> str:
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    return ""


def _state_and_start(pid: int) -> tuple[str, str]:
    """State and start time of a process, empty if there is none; see proc(5), ``/proc/pid/stat``."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return "", ""
    return fields[0].decode(), fields[19].decode()
