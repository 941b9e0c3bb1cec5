"""What a thread can see of its own process and of others: where they stand, signals, whether they have ended."""

from __future__ import annotations

import os
import signal
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

TORCH_DISTRIBUTED = os.path.join("torch", "distributed") + os.sep
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_LIBRARIES = sysconfig.get_path("purelib")
_NOT_OF_USER = (_PACKAGE, _TORCH, _LIBRARIES, sysconfig.get_path("stdlib"), "<")


class Place(NamedTuple):
    """The collective of torch.distributed in which a thread is."""

    group: str  # Name of its process group.
    call: int  # Identity of the call.
    kind: str  # Name of the function.


def waiting_place(thread: int) -> Place | None:
    """Where a thread waits; ``None`` if it is in no collective."""
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
        return Place(group.group_name, id(frame), frame.f_code.co_name)
    except RuntimeError:  # It is being made, and has no name yet.
        return None


def standing_place(thread: int) -> tuple[FSDPModule | None, str]:
    """The FSDP2 unit that a thread gathers the weights of, if any, and the lines that it is in."""
    frame = sys._current_frames().get(thread)
    unit: FSDPModule | None = None
    called: FrameType | None = None  # The innermost frame of a library, where it matters more than the user's.
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
    """A pipe (read, write) that gets the number of each signal; ``None`` where another library has one."""
    if threading.current_thread() is not threading.main_thread():
        return None
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    before = signal.set_wakeup_fd(ends[1], warn_on_full_buffer=False)
    if before == -1:
        _forget_pipe_in_children()
        return ends
    signal.set_wakeup_fd(before)
    for end in ends:
        os.close(end)
    return None


@cache
def _forget_pipe_in_children() -> None:
    """Forked processes, such as workers of a DataLoader, would write their own signals to it."""
    os.register_at_fork(after_in_child=partial(signal.set_wakeup_fd, -1))


def describe_process() -> str:
    """The calling process, for :func:`process_on_this_host` of another one: host (empty if unknown), number, start."""
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
