"""Run a function on several gloo processes, with a hard time limit: the base of every distributed test.

The function is one of an importable module, is called on each rank inside a fresh default process group, sets its own
seeds, and returns something picklable (plain tensors, no DTensors). The workers are kept between calls, so that torch
and what a test imports is paid for once per session.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.support.worker import Call, RankFailure, free_port, qualified_name, serve

# torch 2.11 never lets go of meshes that DTensor has seen, nor of the threads of their process groups.
_MOST_THREADS = 100
_LOG_CHARACTERS = 6000


class RanksFailedError(Exception):
    """What became of the ranks of a call of which not every one returned.

    The message has the traceback or the stack of each rank that did not.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.running = list(range(num_ranks))
        self.results: dict[int, Any] = {}
        self.failures: dict[int, RankFailure] = {}
        self.exit_codes: dict[int, int | None] = {}


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


class ProcessPool:
    """Up to four (or more, if asked for) worker processes that are started when first needed."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._workers: list[Worker] = []
        self._directory: Path | None = None
        self._num_calls = 0

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int = 4,
        timeout: float = 60.0,
        grace: float = 10.0,
        **kwargs: Any,
    ) -> list[Any]:
        """The results of ``function(*args, **kwargs)`` on ``world_size`` ranks, in their order.

        Raises ``RanksFailedError`` if a rank raised, died or did not return in ``timeout`` seconds; collectives time
        out after 3/4 of it. Once a rank has failed, the others get ``grace`` seconds.
        """
        payload = pickle.dumps((function, args, kwargs))
        self._start(world_size)
        workers = self._workers[:world_size]
        try:
            self._send(workers, payload, timeout)
            outcome = _collect(workers, timeout=timeout, grace=grace)
        except BaseException:
            # Ctrl-C, or the time limit of the test: an answer that comes later must not be taken for the next call's.
            self.close()
            raise
        failed = len(outcome.results) < world_size
        if failed:
            outcome.args = (_describe(outcome, workers, function, timeout),)
        if outcome.running or outcome.exit_codes:
            self.close()
        else:
            self._release(workers)
        if failed:
            raise outcome
        return [outcome.results[rank] for rank in range(world_size)]

    def run_fresh(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """As :meth:`run`, in processes that end with the call: for functions that kill, hang or change globals."""
        pool = ProcessPool()
        try:
            return pool.run(function, *args, **kwargs)
        finally:
            pool.close()

    def expect_error_on_all_ranks(
        self,
        function: Callable[..., Any],
        *args: Any,
        match: str,
        exception: type[BaseException] = ValueError,
        world_size: int = 4,
        **kwargs: Any,
    ) -> dict[int, RankFailure]:
        """Assert that every rank raises the same type of ``exception``, with a message that matches; the failures."""
        failed = _failure(self.run, function, *args, world_size=world_size, **kwargs)
        wanted = qualified_name(exception)
        for rank in range(world_size):
            failure = failed.failures.get(rank)
            if failure is None:
                raise AssertionError(f"rank {rank} did not raise {exception.__name__}\n{failed}")
            if wanted not in failure.type_names or not re.search(match, failure.message):
                raise AssertionError(f"rank {rank}: expected {exception.__name__} that matches {match!r}\n{failed}")
        kinds = {failure.type_names[0] for failure in failed.failures.values()}
        assert len(kinds) == 1, f"the ranks raised different types: {sorted(kinds)}\n{failed}"
        return failed.failures

    def expect_end_of_all_ranks(
        self, function: Callable[..., Any], *args: Any, match: str, world_size: int = 4, **kwargs: Any
    ) -> RanksFailedError:
        """Assert that every rank, in a process of its own, ends it with exit code 1 and a log that matches."""
        failed = _failure(self.run_fresh, function, *args, world_size=world_size, **kwargs)
        assert failed.exit_codes == dict.fromkeys(range(world_size), 1), failed
        logs = str(failed).split("--- rank ")[1:]
        assert all(re.search(match, log) for log in logs), f"expected {match!r} in each log\n{failed}"
        return failed

    def close(self) -> None:
        """End the workers; the next call starts new ones."""
        for worker in self._workers:
            worker.kill()
        self._workers = []
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
        atexit.unregister(self.close)

    def _start(self, world_size: int) -> None:
        if any(not worker.process.is_alive() or _num_threads(worker) > _MOST_THREADS for worker in self._workers):
            self.close()
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="gloo-pool-"))
            # multiprocessing joins its children at exit; ours wait for calls until they are ended.
            atexit.register(self.close)
        while len(self._workers) < world_size:
            ours, theirs = self._context.Pipe()
            log = self._directory / f"worker{len(self._workers)}.log"
            process = self._context.Process(target=serve, args=(theirs, str(log)))
            process.start()
            theirs.close()
            self._workers.append(Worker(process=process, connection=ours, log=log))

    def _send(self, workers: list[Worker], payload: bytes, timeout: float) -> None:
        self._num_calls += 1
        port = free_port()
        for rank, worker in enumerate(workers):
            call = Call(
                payload=payload,
                rank=rank,
                world_size=len(workers),
                timeout=timeout,
                store_path=f"{self._directory}/store{self._num_calls}",
                port=port,
                environ=dict(os.environ),
                sys_path=list(sys.path),
            )
            worker.log_start = worker.log.stat().st_size if worker.log.exists() else 0
            worker.connection.send_bytes(pickle.dumps(call))

    def _release(self, workers: list[Worker], limit: float = 10.0) -> None:
        """Let the ranks end their process group; a rank that cannot costs the pool."""
        try:
            for worker in workers:
                worker.connection.send_bytes(b"release")
            deadline = time.monotonic() + limit
            for worker in workers:
                if not worker.connection.poll(max(0.0, deadline - time.monotonic())):
                    self.close()
                    return
                worker.connection.recv_bytes()
        except (EOFError, OSError):
            self.close()


def _failure(run: Callable[..., list[Any]], *args: Any, **kwargs: Any) -> RanksFailedError:
    """That of a call which must not return on all ranks."""
    try:
        results = run(*args, **kwargs)
    except RanksFailedError as error:
        return error
    raise AssertionError(f"an error was expected, but all returned: {results}")


def _collect(workers: list[Worker], *, timeout: float, grace: float) -> RanksFailedError:
    """Wait for the answers, until all are in or time is up; what has become of the ranks, also if all returned."""
    outcome = RanksFailedError(len(workers))
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


def _describe(outcome: RanksFailedError, workers: list[Worker], function: Callable[..., Any], timeout: float) -> str:
    """The message of :class:`RanksFailedError`: first who failed, then how, in the order in which it was seen."""
    name = f"{function.__module__}.{function.__qualname__}"
    parts = [f"{name} failed on {len(workers)} ranks (time limit {timeout:g} s)."]
    for rank, failure in outcome.failures.items():
        parts.append(f"--- rank {rank} raised {failure.type_names[0]}: {failure.message}\n{failure.traceback}")
    for rank, code in outcome.exit_codes.items():
        parts.append(f"--- rank {rank} died, exit code {code} (negative: a signal)\n{workers[rank].log_tail()}")
    for rank in outcome.running:  # faulthandler writes the stacks into the log.
        if workers[rank].process.is_alive():
            os.kill(workers[rank].process.pid or 0, signal.SIGABRT)
    time.sleep(0.5 if outcome.running else 0.0)
    parts += [
        f"--- rank {rank} was still running; stack and output:\n{workers[rank].log_tail()}" for rank in outcome.running
    ]
    if outcome.results:
        parts.append(f"--- ranks that returned: {sorted(outcome.results)}")
    return "\n".join(parts)


def _num_threads(worker: Worker) -> int:
    """Threads of a process on Linux, 0 elsewhere."""
    with suppress(OSError):
        return len(os.listdir(f"/proc/{worker.process.pid}/task"))
    return 0
