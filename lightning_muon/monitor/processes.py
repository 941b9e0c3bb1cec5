"""What a thread can see of its own process and of others: stacks, signals, connections, and whether one has ended."""

from __future__ import annotations

import gc
import operator
import os
import sys
import sysconfig
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule

from lightning_muon.compat.torch import group_awaited_in

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


def _innermost_frame(thread: int) -> FrameType | None:
    if sys.version_info >= (3, 12) or not gc.isenabled():
        return sys._current_frames().get(thread)
    # Python 3.11 may collect garbage inside, with the lock of its list of threads: if that lets go of the interpreter
    # lock, another thread that looks, too, waits for ever. One operation, in which no other thread runs.
    frames: Any
    _, frames, _ = map(operator.call, (gc.disable, sys._current_frames, gc.enable))
    frame = frames.get(thread)
    frames.clear()  # They hold this function's own: a cycle that keeps what all threads hold until a collection.
    return frame


def waiting_place(thread: int) -> CollectiveCall | None:
    """The collective in which a thread waits; ``None`` if it is in none."""
    frame, waits = _innermost_frame(thread), False
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        if TORCH_DISTRIBUTED in frame.f_code.co_filename:
            group, name = group_awaited_in(frame), frame.f_code.co_name
            # Who calls a wait may have a group of its own; what a DTensor is redistributed over is what it waits for.
            if group is not None and (not waits or "device_mesh" in frame.f_locals):
                with suppress(RuntimeError):  # The group is being made, and has no name yet.
                    return CollectiveCall(group.group_name, id(frame), name)
            waits = waits or "wait" in name
            if not waits:
                return None
        frame = frame.f_back  # An operator of torch, in which a functional collective waits.
    return None


def standing_place(thread: int) -> tuple[FSDPModule | None, str]:
    """The FSDP2 unit whose weights a thread gathers, if any, and the lines of code that it is in."""
    frame = _innermost_frame(thread)
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


def describe_process() -> str:
    """Describe the calling process for :func:`is_gone`: host (empty if unknown), number, start."""
    return f"{_host()} {os.getpid()} {_start(os.getpid())}"


def is_gone(description: str) -> bool:
    """Whether ``description`` is of a process of this host that has ended; never ``True`` without ``/proc``."""
    host, pid, start = description.split(" ")
    return bool(host) and host == _host() and _start(int(pid)) != start


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
