"""Two executors of one program: a host that blocks (CPU), and a host that only queues work on streams (CUDA).

Both run the ops of one rank in list order and keep the promises of ``Op.deps``; they differ in who waits. What an op
does is an *action*, looked up by its kind; an action on the transfer lane starts a communication and returns its
handles.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_muon.compat.torch import profiled
from lightning_muon.schedule.program import TRANSFER, Op

Action = Callable[[Op], Sequence[dist.Work]]


class Executor(ABC):
    """Runs ops one by one; one executor serves many steps."""

    def __init__(self, actions: Mapping[str, Action]) -> None:
        self._actions = actions
        self.recorder: Any = None  # Is told when ops start and end; see lightning_muon.monitor.recorder.

    @contextmanager
    def measured(self, op: Op) -> Generator[None]:
        """Context for what is measured as an op, but is none of the program."""
        with profiled(op.kind, op.key):
            if self.recorder is not None:
                self.recorder.started(op)
            yield
            if self.recorder is not None:
                self.recorder.ended(op)

    def begin(self) -> None:  # noqa: B027
        """Begin a step, also after one that has raised."""

    @abstractmethod
    def execute(self, op: Op) -> None:
        """Run one op after the ops that it depends on."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for all ops that still run, and forget the step."""


class HostExecutor(Executor):
    """Compute ops block the host; a communication runs in threads of the backend until an op that needs it begins."""

    def __init__(self, actions: Mapping[str, Action]) -> None:
        super().__init__(actions)
        self._pending: dict[str, Sequence[dist.Work]] = {}
        self._to_record: dict[str, Callable[[], None]] = {}

    @override
    def execute(self, op: Op) -> None:
        for name in op.deps:
            self.wait(name)
        with profiled(op.kind, op.key):
            if self.recorder is not None:
                self.recorder.started(op)
            works = self._actions[op.kind](op)
            if self.recorder is not None:
                self._record_end(op, works, self.recorder)
        if works:
            self._pending[op.name] = works

    @override
    def finish(self) -> None:
        for name in list(self._pending):
            self.wait(name)

    def wait(self, name: str) -> None:
        """Wait until the op called ``name`` has ended, if it was run in this step."""
        for work in self._pending.pop(name, ()):
            work.wait()
        if name in self._to_record:
            self._to_record.pop(name)()

    def _record_end(self, op: Op, works: Sequence[dist.Work], recorder: Any) -> None:
        ended = partial(recorder.ended, op)
        if not works:
            ended()
            return
        try:
            works[-1].get_future().then(lambda _: ended())  # pyright: ignore[reportUnknownMemberType, reportUnknownLambdaType]
        except RuntimeError:
            # gloo's messages between two ranks have no future: they end, for the recorder, when somebody needs them.
            self._to_record[op.name] = ended


class StreamExecutor(Executor):
    """The host queues everything and never waits: one stream per lane, an event at the end of each op.

    The compute lane is the stream that is current at :meth:`begin`. Tensors cross streams only in buffers that
    live as long as the executor's owner, so that the allocator never hands out memory still in use.
    """

    def __init__(self, actions: Mapping[str, Action], device: torch.device) -> None:
        super().__init__(actions)
        self._device, self._transfer = device, torch.cuda.Stream(device, priority=-1)  # Before products.
        self._compute = torch.cuda.current_stream(device)  # Of the current step; to look it up takes torch 30 us.
        self._ended: dict[str, tuple[str, torch.cuda.Event | torch.Event]] = {}

    @override
    def begin(self) -> None:
        self._compute = torch.cuda.current_stream(self._device)
        self._ended.clear()

    @override
    def execute(self, op: Op) -> None:
        is_transfer = op.lane == TRANSFER
        stream = self._transfer if is_transfer else self._compute
        context = torch.cuda.stream(stream) if is_transfer else nullcontext()
        with context, profiled(op.kind, op.key):
            for name in op.deps:
                # Not of an earlier step, for which finish() has waited.
                if name in self._ended and self._ended[name][0] != op.lane:
                    stream.wait_event(self._ended[name][1])
            if self.recorder is not None:
                self.recorder.started(op)
            for work in self._actions[op.kind](op):
                work.wait()  # NCCL: the stream waits, not the host.
            if self.recorder is not None:
                self.recorder.ended(op)
            self._ended[op.name] = op.lane, stream.record_event()

    @override
    def finish(self) -> None:
        for lane, event in self._ended.values():
            if lane == TRANSFER:
                self._compute.wait_event(event)
        self._ended.clear()


def make_executor(actions: Mapping[str, Action], device: torch.device) -> Executor:
    """The executor for ``device``."""
    return StreamExecutor(actions, device) if device.type == "cuda" else HostExecutor(actions)
