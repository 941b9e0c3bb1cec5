"""A device that only keeps the order of what is queued: vector clocks as streams, and who has touched which memory."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_MOST_ACCESSES = 256
Clock = dict[str, int]


def merge(into: Clock, other: Clock) -> None:
    """Let a clock know what another one knows."""
    for name, time in other.items():
        if into.get(name, 0) < time:
            into[name] = time


class Event:
    """In place of ``torch.cuda.Event``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or active().current).clock)

    def synchronize(self) -> None:
        active().sync("event.synchronize", self.clock)


class Stream:
    """In place of ``torch.cuda.Stream``: knows for each stream how much of its work comes before its own next one."""

    def __init__(self, device: object = None, priority: int = 0, *, name: str = "") -> None:
        del device
        self.priority, streams = priority, active().streams
        self.id = name or f"stream{len(streams)}"
        self.device = torch.device("cuda", 0)
        self.clock: Clock = {}
        streams.append(self)

    def tick(self) -> None:
        """Some work is queued."""
        merge(self.clock, active().host)
        self.clock[self.id] = self.clock.get(self.id, 0) + 1

    def wait_event(self, event: Event) -> None:
        merge(self.clock, event.clock)

    def wait_stream(self, stream: Stream) -> None:
        merge(self.clock, stream.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        active().sync("stream.synchronize", self.clock)


@contextlib.contextmanager
def use(stream: Stream) -> Iterator[Stream]:
    """In place of ``torch.cuda.stream``."""
    active().stack.append(stream)
    try:
        yield stream
    finally:
        active().stack.pop()


@dataclass(frozen=True)
class _Access:
    start: int
    stop: int
    stream: str
    time: int
    is_write: bool
    label: str

    def __str__(self) -> str:
        return f"{'write' if self.is_write else 'read'} {self.label} on {self.stream}"


@dataclass
class _Memory:
    """A storage: the stream whose allocator it is of (``None``: pinned memory of the host), and who has touched it."""

    alive: StorageWeakRef
    owner: Stream | None
    accesses: list[_Access] = field(default_factory=list[_Access])
    last: Clock = field(default_factory=Clock)
    recorded: list[Stream] = field(default_factory=list[Stream])


class Simulation:
    """One device and its communicators."""

    def __init__(self) -> None:
        self.on = False  # Whether anything is reported now.
        self.host: Clock = {}  # What the host has waited for.
        self.syncs, self.found = Counter[str](), Counter[str]()
        self.num_steps = 0
        self.streams: list[Stream] = []
        self.stack: list[Stream] = []
        self.pinned: dict[int, StorageWeakRef] = {}
        self._communicators: dict[str, Stream] = {}
        self._memory: dict[int, _Memory] = {}
        # Memory that the allocator of a stream may give out again.
        self._free: dict[str, list[_Memory]] = {}

    @property
    def current(self) -> Stream:
        return self.stack[-1]

    def begin_step(self, *, on: bool) -> None:
        self.on = on
        self.num_steps += on

    def sync(self, what: str, clock: Clock | None = None) -> None:
        """The host waits for the current stream, or for what ``clock`` knows."""
        merge(self.host, self.current.clock if clock is None else clock)
        if self.on:
            self.syncs[f"{what} @ {site()}"] += 1

    def communicator(self, group: Any) -> Stream:
        name = getattr(group, "group_name", "world")
        if name not in self._communicators:
            self._communicators[name] = Stream(name=f"nccl:{len(self._communicators)}")
        return self._communicators[name]

    def access(self, tensor: Tensor, stream: Stream, label: str, *, is_write: bool) -> None:
        """Work on ``stream`` touches a tensor; its memory is of the current stream if it is seen for the first time."""
        if not (tensor.device.type == "cuda" or self.is_pinned(tensor)) or tensor.numel() == 0:
            return
        memory = self._memory_of(tensor)
        size = tensor.element_size()
        start = tensor.storage_offset() * size
        length = 1 + sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride(), strict=True))
        new = _Access(start, start + length * size, stream.id, stream.clock.get(stream.id, 0), is_write, label)
        kept: list[_Access] = []
        for old in memory.accesses:
            is_ordered = old.stream == stream.id or stream.clock.get(old.stream, 0) >= old.time
            overlaps = old.start < new.stop and new.start < old.stop
            if self.on and overlaps and not is_ordered and (is_write or old.is_write):
                self.found[f"RACE {new} || {old}"] += 1
            is_covered = is_write and new.start <= old.start and old.stop <= new.stop and old.stream == stream.id
            if not is_covered:
                kept.append(old)
        memory.accesses = [*kept, new][-_MOST_ACCESSES:]
        memory.last[stream.id] = new.time

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor of the host is in memory that devices copy to and from while the host goes on."""
        known = self.pinned.get(tensor.untyped_storage()._cdata)
        return known is not None and not known.expired()

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        self._memory_of(tensor).recorded.append(stream)

    def look_for_freed(self) -> None:
        """Let the allocators have the memory of tensors that have gone."""
        for key in [key for key, memory in self._memory.items() if memory.alive.expired()]:
            memory = self._memory.pop(key)
            # record_stream: the allocator waits for what that stream has been given so far, and what it waits for.
            known = [self.host, *({**each.clock, each.id: sys.maxsize} for each in memory.recorded)]
            memory.last = {
                name: time for name, time in memory.last.items() if all(clock.get(name, 0) < time for clock in known)
            }
            if memory.owner is not None:
                self._free.setdefault(memory.owner.id, []).append(memory)

    def _memory_of(self, tensor: Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        memory = self._memory.get(storage._cdata)
        if memory is None or memory.alive.expired():
            self.look_for_freed()
            owner = self.current if tensor.device.type == "cuda" else None
            memory = self._memory[storage._cdata] = _Memory(StorageWeakRef(storage), owner)
            self._reuse(self.current)
        return memory

    def _reuse(self, owner: Stream) -> None:
        """An allocation on ``owner`` may get any memory that is free there: must it still wait for another stream?"""
        for memory in self._free.pop(owner.id, ()):
            for name, time in memory.last.items():
                if self.on and name != owner.id and owner.clock.get(name, 0) < time:
                    last = next((each for each in reversed(memory.accesses) if each.stream == name), "an old use")
                    self.found[f"FREE memory of {owner.id} is used again before {last} has ended"] += 1


_ACTIVE: list[Simulation] = []


@contextlib.contextmanager
def simulated() -> Iterator[Simulation]:
    """A new device."""
    simulation = Simulation()
    _ACTIVE.append(simulation)
    simulation.stack.append(Stream(name="default"))
    try:
        yield simulation
    finally:
        _ACTIVE.pop()


def active() -> Simulation:
    """The simulation of the innermost :func:`world`."""
    return _ACTIVE[-1]


def site() -> str:
    """Innermost frame inside of the package."""
    frame = sys._getframe(1)
    while frame is not None:
        _, found, path = frame.f_code.co_filename.rpartition("/lightning_muon/")
        if found:
            return f"{path}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "outside"
