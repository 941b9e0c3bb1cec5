"""Whether a process on this host is gone, as opposed to busy or stopped."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessIdentity:
    """A process that others on the same host can look up.

    Attributes:
        host: The running kernel and the namespace of process numbers; empty where the system does not tell them.
        pid: Number of the process in that namespace.
        start: When it was started, in ticks since the kernel was; tells it from a later process of the same number.
    """

    host: str
    pid: int
    start: str

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
