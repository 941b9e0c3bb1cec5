"""Signals that all ranks answer at the end of the same batch."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from lightning_muon.compat.torch import default_store

_SECONDS_TO_ANSWER = 30.0  # Until a rank that has not said which batch it is in is given up.


class SharedSignals:
    """Runs the handler of a signal on all ranks at the end of the same batch, whichever ranks have got the signal.

    A handler that communicates, as Lightning's do (the one for SIGTERM broadcasts, the one for SLURM's requeue saves a
    checkpoint), must not run wherever its rank is at that moment, between other collectives than those of other ranks.

    A thread of each rank looks into the store of the default process group. A rank that gets a signal says so there;
    then every rank says which batch it is in, and the handler runs at the end of the last one of these.

    Made by the main thread of every rank, at the same batch.
    """

    def __init__(self, handlers: Mapping[int, Callable[[int, Any], Any]], *, interval: float = 0.5) -> None:
        self._handlers, self._interval = handlers, interval
        self._rank, self._size, self._process = dist.get_rank(), dist.get_world_size(), os.getpid()
        # A connection of its own: the main thread may wait in the store.
        store: Any = default_store()
        store = dist.PrefixStore("lightning_muon_signals", store.clone())
        self._store = dist.PrefixStore(str(store.add(f"starts{self._rank}", 1)), store)
        self._received: list[int] = []  # Signals of this rank that nobody has answered yet.
        self._num_answered = 0
        self._lock = threading.Lock()
        self._batch = 0  # The one that this rank is in.
        self._announced: int | None = None  # The signal that all ranks are about to answer.
        self._closed = threading.Event()
        for number in handlers:
            signal.signal(number, self._receive)
        threading.Thread(target=self._watch, name="lightning_muon_signals", daemon=True).start()

    def batch_has_ended(self) -> None:
        """Answer a signal if its time has come. Every rank must call it after each of its batches."""
        with self._lock:
            self._batch += 1
            number = self._announced
        if number is None or self._batch <= max(self._batches_of_ranks()):
            return
        with self._lock:
            while number in self._received:
                self._received.remove(number)
            self._announced = None
            self._num_answered += 1
        self._handlers[number](number, None)

    def close(self) -> None:
        """Look for no more signals; who has made this puts the handlers back. Local."""
        self._closed.set()

    def _receive(self, number: int, _: Any) -> None:
        if os.getpid() == self._process:
            self._received.append(number)
        else:  # A forked process has inherited the handler, but neither thread nor batches.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _watch(self) -> None:
        """Body of the thread: pass signals on, and say which batch this rank is in."""
        while not self._closed.wait(self._interval):
            # The store ends with its rank.
            with suppress(RuntimeError), self._lock:
                key = f"signal{self._num_answered}"
                if self._received:
                    self._store.compare_set(key, "", str(self._received[0]))
                if self._announced is None and self._store.check([key]):
                    self._store.set(f"{key} batch{self._rank}", str(self._batch))
                    self._announced = int(self._store.get(key))

    def _batches_of_ranks(self) -> list[int]:
        keys = [f"signal{self._num_answered} batch{rank}" for rank in range(self._size)]
        deadline = time.monotonic() + _SECONDS_TO_ANSWER
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                missing = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
                raise RuntimeError(
                    f"a signal has told the run to end or to save; rank {', '.join(missing)} has not said for "
                    f"{_SECONDS_TO_ANSWER:.0f} s which batch it is in, and may have died"
                )
            time.sleep(self._interval / 10)
        return [int(text) for text in self._store.multi_get(keys)]
