"""What a thread can see of its own process and of others: stacks, signals, connections, and whether one has ended."""

from __future__ import annotations

import os
import signal
import socket
import sys
import sysconfig
import threading
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from lightning_muon.compat.torch import gloo_endpoints, process_groups

TORCH_DISTRIBUTED = os.path.join("torch", "distributed") + os.sep
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_LIBRARIES = sysconfig.get_path("purelib")
_NOT_OF_USER = (_PACKAGE, _TORCH, _LIBRARIES, sysconfig.get_path("stdlib"), "<")


class CollectiveCall(NamedTuple):
    """A collective of torch.distributed in which a thread is."""

    group: str  # Name of its process group.
    call: int  # Identity of the call.
    kind: str  # Name of the function.


def waiting_place(thread: int) -> CollectiveCall | None:
    """The collective in which a thread waits; ``None`` if it is in none."""
    frame = sys._current_frames().get(thread)
    if frame is None or TORCH_DISTRIBUTED not in frame.f_code.co_filename:
        return None
    known = frame.f_locals
    if "group" not in known and "pg" not in known:
        return None
    group = known.get("group") or known.get("pg") or dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        return None
    try:
        return CollectiveCall(group.group_name, id(frame), frame.f_code.co_name)
    except RuntimeError:  # The group is being made, and has no name yet.
        return None


def standing_place(thread: int) -> tuple[FSDPModule | None, str]:
    """The FSDP2 unit whose weights a thread gathers, if any, and the lines of code that it is in."""
    frame = sys._current_frames().get(thread)
    unit: FSDPModule | None = None
    called: FrameType | None = None  # The innermost frame of another library, shown beside the user's.
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_OF_USER):
        name = frame.f_code.co_filename
        if TORCH_DISTRIBUTED in name and unit is None and called is None:
            known = (frame.f_locals.get("module"), frame.f_locals.get("self"))
            unit = next((value for value in known if isinstance(value, FSDPModule)), None)
        elif called is None and name.startswith(_LIBRARIES) and not name.startswith((_PACKAGE, _TORCH)):
            called = frame
        frame = frame.f_back
    return unit, ", from ".join(_line(each) for each in (called, frame) if each is not None)


def _line(frame: FrameType) -> str:
    path = frame.f_code.co_filename.removeprefix(_LIBRARIES + os.sep).removeprefix(os.getcwd() + os.sep)
    return f"{path}:{frame.f_lineno} ({frame.f_code.co_name})"


def signal_pipe() -> tuple[int, int] | None:
    """A pipe (read, write) that gets the number of each signal; ``None`` if another library has such a pipe."""
    if threading.current_thread() is not threading.main_thread():
        return None
    before = signal.set_wakeup_fd(-1)
    if before != -1:
        signal.set_wakeup_fd(before)
        return None
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    signal.set_wakeup_fd(ends[1], warn_on_full_buffer=False)
    _forget_pipe_in_children()
    return ends


@cache
def _forget_pipe_in_children() -> None:
    """Detach forked processes, such as workers of a DataLoader, which would write their own signals to the pipe."""
    os.register_at_fork(after_in_child=partial(signal.set_wakeup_fd, -1))


def describe_process() -> str:
    """Describe the calling process for :func:`is_gone`: host (empty if unknown), number, start."""
    return f"{_host()} {os.getpid()} {_start(os.getpid())}"


def is_gone(description: str) -> bool:
    """Whether ``description`` is of a process of this host that has ended; never ``True`` without ``/proc``."""
    host, pid, start = description.split(" ")
    return bool(host) and host == _host() and _start(int(pid)) != start


def is_parent(description: str) -> bool:
    """Whether ``description`` is of the parent of the calling process."""
    host, pid, _ = description.split(" ")
    return bool(host) and host == _host() and int(pid) == os.getppid()


@cache
def _host() -> str:
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    return ""


def _start(pid: int) -> str:
    """Start time in ticks of a process, empty if it has ended; see proc(5), ``/proc/pid/stat``."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        # Z and X: it has ended, and its parent has not read its exit code yet.
        return "" if fields[0] in (b"Z", b"X") else fields[19].decode()
    return ""


class GlooConnections:
    """Finds the TCP connections of this process's gloo groups, and no others, so that they can be closed.

    Each rank of a gloo group listens at a port of its own, and writes it into the ``store`` when the group is made. So
    a connection belongs to the group if one of its ends is one of these ports, here or on another rank.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._endpoints: dict[str, list[tuple[str, int]]] = {}  # By name of the group.

    def record(self) -> None:
        """Store the ports at which the ranks of new groups listen; local."""
        groups = {group.group_name: group for group in process_groups()}
        # The port of a destroyed group may be in use by others.
        known = {name: endpoints for name, endpoints in self._endpoints.items() if name in groups}
        new = {name: gloo_endpoints(self._store, group) for name, group in groups.items() if name not in known}
        self._endpoints = known | {name: endpoints for name, endpoints in new.items() if endpoints}

    def abort(self) -> None:
        """Make every collective that this process waits in raise ``RuntimeError``, here and on its peers; local.

        NCCL communicators are aborted. gloo ignores ``abort`` and ``shutdown`` (torch 2.11 to 2.14: the waiting thread
        sleeps on until its timeout), but sees closed connections. Needs ``/proc`` for gloo.
        """
        for group in process_groups():
            if dist.get_backend(group) != "gloo":
                # Some backends have no abort.
                with suppress(RuntimeError):
                    group.abort()
        ends = {endpoint for endpoints in self._endpoints.values() for endpoint in endpoints}
        # Sockets only: fromfd() would leave its duplicate of another file open.
        for path in filter(Path.is_socket, Path("/proc/self/fd").glob("*")):
            # Errors are of sockets that were closed meanwhile, are not connected, or of another kind.
            with suppress(OSError), socket.fromfd(int(path.name), -1, -1) as one:  # A duplicate, which is closed.
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                    here, there = one.getsockname()[:2], one.getpeername()[:2]
                    if here in ends or there in ends:
                        one.shutdown(socket.SHUT_RDWR)
