"""Where a rank stands while it makes no progress, whether its process lives, and what the positions of all prove."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch.distributed as dist

from lightning_muon.sharding.fsdp_call_log import FsdpCallLog

_TORCH_DISTRIBUTED = os.path.join("torch", "distributed") + os.sep


@dataclass(frozen=True, kw_only=True)
class Position:
    """What one rank publishes, as JSON."""

    step: int  # Steps and evaluations that this rank has ended.
    shard: int  # The lowest rank with which it shares the weights.
    mesh: int  # The lowest rank with which it shares gradients.
    # Calls of this step: how many are left out, the first ones (ranks further apart prove nothing), and the others. The
    # second one has those that all ranks have in common.
    calls: tuple[int, list[int]]
    crossing: tuple[int, list[int]]
    # Name of the process group in whose collective the rank waits, `None` if it does something else. A barrier of the
    # call log counts as a group of its own.
    group: str | None
    counts: Mapping[str, int]  # Collectives launched in each process group.
    beat: int = 0  # How often the rank has looked since it last got on.
    has_ended: bool = False  # The rank gives no more signs of life: it has left its run, or its step has raised.


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
    """The reason why these ranks, by their global number, can never meet; ``None`` if they may."""
    # Compare the calls of ranks in the same step: all of them inside each shard group, others over each mesh.
    of_shards: dict[tuple[int, int], dict[int, tuple[int, list[int]]]] = {}
    of_meshes: dict[tuple[int, int], dict[int, tuple[int, list[int]]]] = {}
    for rank, position in positions.items():
        of_shards.setdefault((position.step, position.shard), {})[rank] = position.calls
        of_meshes.setdefault((position.step, position.mesh), {})[rank] = position.crossing
    for tails in (*of_shards.values(), *of_meshes.values()):  # The calls of a shard group say more.
        found = call_log.describe(tails, complete=False)
        if found is not None:
            return found
    for (first, a), (second, b) in combinations(sorted(positions.items()), 2):
        if _never_meet(a, b):
            places = f"rank {first} {_place(a, call_log)}, rank {second} {_place(b, call_log)}"
            calls = [position.calls[1][-1] for position in (a, b) if position.calls[1]]
            return f"The ranks wait for each other in different places: {places}. {call_log.advice(calls)}"
    return None


def _never_meet(a: Position, b: Position) -> bool:
    """Whether each waits for something that the other will not launch before it.

    A rank waits in the last collective that it has launched in that group. Being ahead in one group proves nothing:
    the other may be slow.
    """
    if a.group is None or b.group is None or a.step != b.step or min(a.beat, b.beat) < 2:
        return False
    if a.group == b.group:
        if a.counts.get(a.group) != b.counts.get(a.group):
            return False
        # They have logged differently much of what they must have in common.
        if a.shard == b.shard:
            return _length(a.calls) != _length(b.calls)
        return a.mesh == b.mesh and _length(a.crossing) != _length(b.crossing)
    in_both = all(group in position.counts for group in (a.group, b.group) for position in (a, b))
    return in_both and b.counts[a.group] < a.counts[a.group] and a.counts[b.group] < b.counts[b.group]


def _length(calls: tuple[int, list[int]]) -> int:
    return calls[0] + len(calls[1])


def _place(position: Position, call_log: FsdpCallLog) -> str:
    _, calls = position.calls
    return f"waits after it {call_log.text(calls[-1])}" if calls else "has run no unit in this step"


def describe_process() -> str:
    """The calling process, for :func:`process_on_this_host` of another one: host, number and start time.

    The host is the running kernel and the namespace of process numbers, and empty where the system does not tell them.
    """
    _, start = _state_and_start(os.getpid())
    return f"{_host() if start else ''} {os.getpid()} {start}"


def process_on_this_host(description: str) -> tuple[int, str] | None:
    """Number and start time of a process that can be looked up here; never where the system has no ``/proc``."""
    host, pid, start = description.split(" ")
    return (int(pid), start) if host and host == _host() else None


def is_gone(pid: int, start: str) -> bool:
    """Whether a process of this host has ended."""
    state, found = _state_and_start(pid)
    # Z and X: it has ended, and its parent has not asked for its exit code yet.
    return found != start or state in ("Z", "X")


def _host() -> str:
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    return ""


def _state_and_start(pid: int) -> tuple[str, str]:
    """State and start time in ticks of a process, empty if there is none; see proc(5), ``/proc/pid/stat``."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return "", ""
    return fields[0].decode(), fields[19].decode()
