"""What came of one call of :mod:`tests.support.processes`: results, failures, and the message that tells them."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.support.worker import RankFailure

_LOG_CHARACTERS = 6000


class RanksFailedError(Exception):
    """Not every rank returned. The message has the traceback or the stack of each rank that did not."""

    def __init__(self, message: str, outcome: Outcome) -> None:
        super().__init__(message)
        self.results = outcome.results
        self.failures = outcome.failures
        self.exit_codes = outcome.exit_codes
        self.running = outcome.running


@dataclass(kw_only=True)
class Outcome:
    """What became of the ranks of one call."""

    running: list[int]
    results: dict[int, Any] = field(default_factory=dict[int, Any])
    failures: dict[int, RankFailure] = field(default_factory=dict[int, RankFailure])
    exit_codes: dict[int, int | None] = field(default_factory=dict[int, "int | None"])


@dataclass(kw_only=True)
class Worker:
    """One child process, its pipe and its log."""

    process: BaseProcess
    connection: Connection
    log: Path
    log_start: int = 0

    def log_tail(self) -> str:
        """What the worker printed in this call."""
        text = self.log.read_bytes()[self.log_start :].decode(errors="replace") if self.log.exists() else ""
        return text[-_LOG_CHARACTERS:]

    def kill(self) -> None:
        """End the process and its own children (each worker leads a process group)."""
        if self.process.is_alive():
            with suppress(ProcessLookupError, PermissionError):
                pid = self.process.pid or 0
                if os.getpgid(pid) == pid:  # A worker starts a group first of all.
                    os.killpg(pid, signal.SIGKILL)
            self.process.kill()
        self.process.join(10.0)
        self.connection.close()


def collect(workers: list[Worker], *, timeout: float, grace: float) -> Outcome:
    """Wait for the answers, until all are in or time is up."""
    outcome = Outcome(running=list(range(len(workers))))
    deadline = time.monotonic() + timeout
    while outcome.running:
        ranks = {workers[rank].connection: rank for rank in outcome.running}
        ready = wait(list(ranks), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in sorted(ranks[connection] for connection in ready):
            outcome.running.remove(rank)
            try:
                answer = pickle.loads(workers[rank].connection.recv_bytes())
            except (EOFError, OSError):
                workers[rank].process.join(1.0)
                outcome.exit_codes[rank] = workers[rank].process.exitcode
            else:
                if isinstance(answer, RankFailure):
                    outcome.failures[rank] = answer
                else:
                    outcome.results[rank] = pickle.loads(answer)
                    continue
            deadline = min(deadline, time.monotonic() + grace)
    return outcome


def describe(outcome: Outcome, workers: list[Worker], function: Callable[..., Any], timeout: float) -> str:
    """The message of :class:`RanksFailedError`: first who failed, then how, in the order in which it was seen."""
    name = f"{function.__module__}.{function.__qualname__}"
    parts = [f"{name} failed on {len(workers)} ranks (time limit {timeout:g} s)."]
    for rank, failure in outcome.failures.items():
        parts.append(f"--- rank {rank} raised {failure.type_names[0]}: {failure.message}\n{failure.traceback}")
    for rank, code in outcome.exit_codes.items():
        parts.append(f"--- rank {rank} died, exit code {code} (negative: a signal)\n{workers[rank].log_tail()}")
    for rank in outcome.running:  # faulthandler writes the stacks into the log.
        if workers[rank].process.is_alive():
            os.kill(workers[rank].process.pid or 0, signal.SIGUSR1)
    time.sleep(0.5 if outcome.running else 0.0)
    parts += [
        f"--- rank {rank} was still running; stack and output:\n{workers[rank].log_tail()}" for rank in outcome.running
    ]
    if outcome.results:
        parts.append(f"--- ranks that returned: {sorted(outcome.results)}")
    return "\n".join(parts)
