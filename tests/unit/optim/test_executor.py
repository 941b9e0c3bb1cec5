"""Both executors on small programs: order and waiting. CUDA's streams are played by objects that take notes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_muon.optim import executor as executor_module
from lightning_muon.optim.executor import HostExecutor, StreamExecutor
from lightning_muon.schedule.program import TRANSFER, Op

GATHER = Op(kind="gather", key="0", rank=0, lane=TRANSFER)
COMPUTE = Op(kind="compute", key="0", rank=0, deps=("gather[0]",))
OTHER = Op(kind="compute", key="1", rank=0)


class _Work:
    """A communication that is finished by waiting for it."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name
        self._future: torch.futures.Future[None] = torch.futures.Future()

    def wait(self) -> None:
        self._log.append(f"wait {self._name}")
        if not self._future.done():
            self._future.set_result(None)

    def get_future(self) -> torch.futures.Future[None]:
        return self._future


def _actions(log: list[str]) -> dict[str, Any]:
    def gather(op: Op) -> list[_Work]:
        log.append(f"start {op.name}")
        return [_Work(log, op.name)]

    def compute(op: Op) -> tuple[()]:
        log.append(op.name)
        return ()

    return {"gather": gather, "compute": compute}


def test_finish_waits_for_what_nobody_needed_once() -> None:
    log: list[str] = []
    executor = HostExecutor(_actions(log))
    executor.execute(GATHER)
    executor.finish()
    executor.finish()
    executor.wait("gather[0]")
    assert log == ["start gather[0]", "wait gather[0]"]


@pytest.mark.parametrize("has_future", [True, False])
def test_the_recorder_sees_a_transfer_end_when_it_is_waited_for(has_future: bool) -> None:
    log: list[str] = []
    executor = HostExecutor(_actions(log))
    notes = {what: lambda op, what=what: log.append(f"{what} {op.name}") for what in ("started", "ended")}
    executor.recorder = mock.Mock(**notes)
    error = contextlib.nullcontext() if has_future else mock.patch.object(_Work, "get_future", side_effect=RuntimeError)
    with error:
        executor.execute(GATHER)
    for op in (OTHER, COMPUTE):
        executor.execute(op)
    assert log == [
        *("started gather[0]", "start gather[0]"),
        *("started compute[1]", "compute[1]", "ended compute[1]"),
        *("wait gather[0]", "ended gather[0]"),
        *("started compute[0]", "compute[0]", "ended compute[0]"),
    ]


class _Stream:
    """Notes what it is told; ``current`` is the stream that ops run on."""

    current: _Stream
    log: list[str]

    def __init__(self, name: str) -> None:
        self.name = name

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def wait_stream(self, other: _Stream) -> None:
        self.log.append(f"{self.name} waits for all of {other.name}")

    def record_event(self) -> str:
        return f"{self.name}:{len(self.log)}"


@contextlib.contextmanager
def _use(stream: _Stream) -> Iterator[None]:
    before, _Stream.current = _Stream.current, stream
    yield
    _Stream.current = before


@pytest.fixture
def log() -> Iterator[list[str]]:
    log: list[str] = []
    _Stream.log, _Stream.current = log, _Stream("main")
    cuda = mock.Mock(Stream=lambda _: _Stream("transfer"), stream=_use, current_stream=lambda: _Stream.current)
    with mock.patch.object(executor_module.torch, "cuda", cuda):
        yield log


def _stream_executor(log: list[str]) -> StreamExecutor:
    def note(op: Op) -> tuple[()]:
        log.append(f"{op.name} on {_Stream.current.name}")
        return ()

    return StreamExecutor({"gather": note, "compute": note}, torch.device("cuda", 0))


def test_an_op_waits_for_the_event_of_a_transfer_of_its_step(log: list[str]) -> None:
    executor = _stream_executor(log)
    for op in (GATHER, OTHER, COMPUTE):
        executor.execute(op)
    assert log == ["gather[0] on transfer", "compute[1] on main", "main waits for transfer:1", "compute[0] on main"]
    executor.execute(GATHER)
    executor.finish()
    del log[:]
    executor.execute(COMPUTE)
    assert log == ["compute[0] on main"]


def test_a_step_on_another_stream_lets_the_first_one_wait(log: list[str]) -> None:
    executor, other = _stream_executor(log), _Stream("other")
    executor.execute(OTHER)
    # What was used there must not be given away on the first one before.
    with _use(other):
        executor.finish()
    assert log[1:] == ["other waits for main:1", "main waits for all of other"]
