"""Signals whose handlers all ranks run at the end of the same batch."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from lightning_muon.comm.agreement import missing_at
from lightning_muon.compat.torch import default_store
from lightning_muon.monitor.processes import describe_process, is_gone, is_parent

_log = logging.getLogger(__name__)
_SECONDS_OF_ONE_PRESS = 2.0  # A terminal sends Ctrl-C to all of its processes, and launchers send it again.
_INTERVAL = 0.5  # Seconds between two reads of the store.
_SECONDS_TO_ANSWER = 30.0  # Timeout for a rank to publish its batch.
_SECONDS_OF_FIRST_RANK = 60.0  # Timeout for the first rank to end, once it has saved.


def _wait_until_gone(process: str) -> None:
    """Wait for the first rank: Lightning runs its launcher there, and kills it when a rank ends with an exit code."""
    deadline = time.monotonic() + _SECONDS_OF_FIRST_RANK
    while not is_gone(process) and time.monotonic() < deadline:
        time.sleep(0.1)


class SharedSignals:
    """Runs the handler of a signal on all ranks at the end of the same batch, whichever ranks have got the signal.

    A handler that communicates, as Lightning's do (the one for SIGTERM broadcasts, the one for SLURM's requeue saves a
    checkpoint), must not run at once: on each rank it would come between different collectives. Instead, a thread of

    each rank reads the store of the default process group, if there is one. A rank that gets a signal writes it there;
    then every rank writes its batch number, and the handler runs at the end of the largest of these. A second Ctrl-C
    raises ``KeyboardInterrupt`` at once.

    Made by the main thread of every rank, at the same batch.
    """

    def __init__(self, handlers: Mapping[int, Callable[[int, Any], Any]]) -> None:
        self._handlers, self._process = handlers, os.getpid()
        store: Any = dist.HashStore()
        self._rank, self._size = 0, 1
        if dist.is_initialized():
            self._rank, self._size = dist.get_rank(), dist.get_world_size()
            # A connection of its own: the main thread may wait in the store.
            default: Any = default_store()
            store = default.clone()
        store = dist.PrefixStore("lightning_muon_signals", store)
        self._store = dist.PrefixStore(str(store.add(f"starts{self._rank}", 1)), store)
        if self._rank == 0:
            self._store.set("first process", describe_process())
        self._received: list[int] = []  # Signals of this rank whose handlers were not run yet.
        self._num_answered = 0
        self._pressed: float | None = None  # Time of the first Ctrl-C.
        self._lock = threading.Lock()
        self._batch = 0  # Number of this rank's current batch.
        self._announced: int | None = None  # The signal whose handler all ranks will run.
        self._closed = threading.Event()
        for number in handlers:
            signal.signal(number, self._receive)
        self._thread = threading.Thread(target=self._watch, name="lightning_muon_signals", daemon=True)
        self._thread.start()

    @property
    def unanswered(self) -> list[int]:
        """Signals of this rank whose handlers were not run yet; local."""
        return list(self._received)

    def batch_has_ended(self, *, may_answer: bool = True) -> None:
        """Run a signal's handler if all ranks do so after this batch. All must call it alike, after each batch."""
        with self._lock:
            self._batch += 1
            number = self._announced
        if number is None or not may_answer or self._batch <= max(self._batches_of_ranks()):
            return
        with self._lock:
            while number in self._received:
                self._received.remove(number)
            self._announced = None
            self._num_answered += 1
        first_process = self._store.get("first process").decode()
        if is_parent(first_process):
            atexit.register(_wait_until_gone, first_process)
        self._handlers[number](number, None)

    def close(self) -> None:
        """Stop watching for signals; the owner restores the handlers. Local."""
        if not self._closed.is_set():
            self._closed.set()
            # A rank that has got a signal meanwhile needs the last batch number of this one.
            with suppress(RuntimeError), self._lock:
                self._say_batch()
            self._thread.join(2 * _INTERVAL)  # It may wait in the store.

    def _receive(self, number: int, frame: Any) -> None:
        if os.getpid() == self._process:
            self._received.append(number)
            if number == signal.SIGINT:
                self._press(frame)
        else:  # A forked process has inherited the handler, but neither thread nor batches.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _press(self, frame: Any) -> None:
        now = time.monotonic()
        if self._pressed is not None and now - self._pressed > _SECONDS_OF_ONE_PRESS:
            signal.default_int_handler(signal.SIGINT, frame)
        if self._pressed is None:
            self._pressed = now
            if self._rank == 0:
                _log.warning("Ctrl-C: all ranks end after the same batch; press it again to end at once")

    def _say_batch(self) -> None:
        self._store.set(f"signal{self._num_answered} batch{self._rank}", str(self._batch))

    def _watch(self) -> None:
        """Body of the thread: write signals and the batch of this rank to the store."""
        while not self._closed.wait(_INTERVAL):
            # The store may have ended with its rank.
            with suppress(RuntimeError), self._lock:
                key = f"signal{self._num_answered}"
                if self._received:
                    self._store.compare_set(key, "", str(self._received[0]))
                if self._announced is None and self._store.check([key]):
                    self._say_batch()
                    self._announced = int(self._store.get(key))

    def _batches_of_ranks(self) -> list[int]:
        keys = [f"signal{self._num_answered} batch{rank}" for rank in range(self._size)]
        missing = [str(keys.index(key)) for key in missing_at(self._store, keys, _SECONDS_TO_ANSWER)]
        if missing:
            raise RuntimeError(
                f"a signal has told the run to end or to save; rank {', '.join(missing)} has not said for "
                f"{_SECONDS_TO_ANSWER:.0f} s which batch it is in, and may have died"
            )
        return [int(text) for text in self._store.multi_get(keys)]


class StopSignals:
    """Tells all ranks after the same batch that some rank has got SIGTERM or Ctrl-C, in the user's own loops.

    Enter it on every rank, after the process group is made (``fabric.launch()``, ``Accelerator()``). Save inside of the
    block: when it ends after such a signal, the program ends with the exit code 143 (SIGTERM) or 130 (Ctrl-C). A
    signal after the last call of :meth:`requested` has its usual effect at the end of the block. A second Ctrl-C, two
    seconds later or more, raises ``KeyboardInterrupt`` at once.

    Example::

        with lightning_muon.StopSignals() as stop:
            for batch in loader:
                fabric.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                if stop.requested():
                    fabric.save("checkpoint", {"model": model, "optimizer": optimizer})
                    break
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._number = 0  # Number of the signal that all ranks have handled.

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        caught = [number for number, handler in self._before.items() if handler != signal.SIG_IGN]
        self._size = dist.get_world_size() if dist.is_initialized() else 1
        self._shared = SharedSignals(dict.fromkeys(caught, self._answer))
        return self

    def requested(self) -> bool:
        """Whether any rank has got a signal to end; stays ``True`` from then on.

        Every rank must call it alike after each of its batches: the ranks count the calls. It does not communicate
        before a signal has come.
        """
        if dist.is_initialized() and dist.get_world_size() != self._size:
            raise RuntimeError("StopSignals was entered before the process group was there; enter it after the launch")
        if not self._number:
            self._shared.batch_has_ended()
        return bool(self._number)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._shared.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if kind is not None:
            return
        if self._number:
            raise SystemExit(128 + self._number)
        for number in self._shared.unanswered:
            os.kill(os.getpid(), number)

    def _answer(self, number: int, _: Any) -> None:
        self._number = number
