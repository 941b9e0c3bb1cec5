"""Ends a run whose ranks wait for each other in different units, within ten seconds and with the names of the units."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from types import TracebackType

import torch.distributed as dist

from lightning_muon.compat.torch import default_store, process_groups
from lightning_muon.monitor.positions import Position, find_mismatch, waiting_place
from lightning_muon.monitor.unblock import break_communication
from lightning_muon.sharding.unit_order import UnitOrder

_POLL_SECONDS = 0.002  # About the time of one collective of gloo.


class Watchdog:
    """A thread that compares where the ranks wait, once this rank has not got on for some seconds.

    A rank that stands still publishes its position in the store of the default process group: the units it has run in
    this step, the collective it waits in, and how many it has launched. The lowest rank that still trains compares.
    Ranks are stopped only on proof that they can never meet: their orders of units differ, or two of them wait for
    each other in different collectives, or one has failed. A rank that loads data, compiles, writes a checkpoint or
    stands in a debugger proves nothing, so the others wait for it. While ranks get on, the thread only looks at two
    integers twice a second.

    With gloo, where messages of different sizes end the process, ranks also wait for all others through the store
    before they run units in an order that is new to them.

    On proof the communication of all ranks is broken, so that what waits raises, and :meth:`explaining` turns that into
    a ``RuntimeError`` that names the units. A process that waits on regardless is ended with the message on stderr.

    Every rank must start it, the second one of a process group after the first one and so on.

    Args:
        order: Notes of this rank, usually ``GradientAgreement.order``.
        patience: Seconds without progress before a rank publishes its position.
        interval: Seconds between two looks. Proof takes two equal looks.

    Example::

        watchdog = Watchdog(agreement.order)
        watchdog.start()
        with watchdog.explaining():
            model(batch).sum().backward()
            agreement.finish()
        watchdog.close()
    """

    def __init__(self, order: UnitOrder, *, patience: float = 4.0, interval: float = 0.5) -> None:
        self._order = order
        self._patience, self._interval = patience, interval
        self._closed = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._message = ""
        self._failure: str | None = None
        self._left = False
        self._num_gates, self._in_gate = 0, False
        self._gate_keys: tuple[str, ...] = ()
        self._main = threading.main_thread().ident or 0

    def start(self) -> None:
        """Watch from now on. Without a process group of several ranks nothing is watched; local."""
        if self._thread is not None or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        store = default_store()
        self._ports = _store_ports(store)
        # A connection of its own: the main thread may wait in the store.
        store = dist.PrefixStore("lightning_muon_watchdog", store.clone())
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._store = dist.PrefixStore(str(store.add(f"starts{self._rank}", 1)), store)
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="lightning_muon_watchdog", daemon=True)
        self._thread.start()
        if any(dist.get_backend(group) == "gloo" for group in process_groups()):
            self._order.gate = self._wait_for_all

    def close(self) -> None:
        """Stop watching; the others learn that this rank waits for nobody any more; local."""
        if self._thread is None:
            return
        self._closed.set()
        self._order.gate = None
        self._thread.join(timeout=2 * self._interval)
        self._thread = None
        if not self._left:
            self._left = True
            self._order.mark("left")
            # The store may be gone together with its rank.
            with suppress(RuntimeError):
                self._publish(beat=0)

    @contextmanager
    def explaining(self) -> Generator[None]:
        """Turn the exception of a collective that was broken off into the reason; report others to waiting ranks."""
        try:
            yield
        except BaseException as error:
            if self._thread is None:
                raise
            self._failure = f"{type(error).__name__}: {error}"[:1000]
            in_collective = _ended_in_collective(error.__traceback__)
            if in_collective and isinstance(error, RuntimeError):
                # The others stand still a little later; their positions may say why.
                self._stopped.wait(self._patience + 6 * self._interval)
            if self._message:
                raise RuntimeError(self._message) from error
            self._tell(f"rank {self._rank} has failed: {self._failure}")
            # What this rank does now, such as saving a checkpoint together with others that have failed, is not judged.
            self._closed.set()
            self._order.gate = None
            raise

    def _wait_for_all(self, number: int, note: int) -> None:
        """The gate of the order: wait until all ranks run the same. Collective over all ranks; every rank must call it.

        A rank that does not is why this thread watches.
        """
        self._num_gates += 1
        self._in_gate = True
        if self._store.add(f"arrived{number}_{note}", 1) == self._size:
            self._store.set(f"all{number}_{note}", "")
        while not self._store.check([f"all{number}_{note}"]):
            if self._stopped.wait(_POLL_SECONDS):
                raise RuntimeError(self._message)
        self._in_gate = False
        if self._rank == 0:
            # All ranks are here, so none reads the keys of the gate before any more.
            for key in self._gate_keys:
                self._store.delete_key(key)
        self._gate_keys = (f"arrived{number}_{note}", f"all{number}_{note}")

    def _watch(self) -> None:
        """Body of the thread: look, and after some seconds without progress publish, compare, obey."""
        last, since, beat = None, time.monotonic(), 0
        problem: str | None = None
        while not self._closed.wait(self._interval):
            now = (*self._order.position(), waiting_place(self._main))
            if now != last:
                last, since, beat, problem = now, time.monotonic(), 0, None
            elif time.monotonic() - since >= self._patience - self._interval:
                beat += 1
                # The store may be gone together with its rank: then connections are closed, and all raise anyway.
                with suppress(RuntimeError):
                    self._publish(beat)
                    found = self._compare() if self._judges() else None
                    if found is not None and found == problem:
                        self._tell(found)
                    problem = found
                    if self._obey():
                        return

    def _publish(self, beat: int) -> None:
        position = Position.current(self._order, self._main, beat=beat, left=self._left, failure=self._failure)
        position = position.with_gate(self._num_gates, waits=self._in_gate)
        self._store.set(f"position{self._rank}", position.to_text())

    def _judges(self) -> bool:
        """Whether this rank compares: rank 0, or any other once rank 0 has left."""
        first = self._read(0)
        return self._rank == 0 or (first is not None and first.left)

    def _read(self, rank: int) -> Position | None:
        key = f"position{rank}"
        return Position.from_text(self._store.get(key).decode()) if self._store.check([key]) else None

    def _compare(self) -> str | None:
        found = {rank: self._read(rank) for rank in range(self._size)}
        return find_mismatch({rank: seen for rank, seen in found.items() if seen is not None}, self._order)

    def _tell(self, message: str) -> None:
        """Tell all ranks to stop; the first message stays."""
        with suppress(RuntimeError):
            if not self._store.check(["stop"]):
                self._store.set("stop", message)

    def _obey(self) -> bool:
        """Stop if some rank has said so: break the communication, and end the process if that does not help."""
        if not self._store.check(["stop"]):
            return False
        self._message = self._store.get("stop").decode()
        self._stopped.set()
        place = waiting_place(self._main)
        # Give the others the time to read it before connections close.
        time.sleep(2 * self._interval)
        break_communication(self._ports)
        if not self._closed.wait(3.0) and place is not None and waiting_place(self._main) == place:
            sys.stderr.write(f"lightning_muon: {self._message}\n")
            sys.stderr.flush()
            os._exit(1)
        return True


@contextmanager
def watching(order: UnitOrder, *, patience: float = 4.0) -> Generator[Watchdog]:
    """Watch, and explain exceptions, while the block runs. Every rank must enter it."""
    watchdog = Watchdog(order, patience=patience)
    watchdog.start()
    try:
        with watchdog.explaining():
            yield watchdog
    finally:
        watchdog.close()


def _ended_in_collective(traceback: TracebackType | None) -> bool:
    """Whether an exception came out of torch.distributed."""
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    name = "" if traceback is None else traceback.tb_frame.f_code.co_filename
    return os.path.join("torch", "distributed") in name


def _store_ports(store: dist.Store) -> set[int]:
    """The port at which this process may serve the store to the others."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return {store.port} if isinstance(store, dist.TCPStore) else set()
