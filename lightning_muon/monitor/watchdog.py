"""Ends a run within ten seconds if ranks wait for each other in different units, with an error that names these."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import combinations
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.compat.torch import collective_counts, default_store
from lightning_muon.monitor.processes import (
    TORCH_DISTRIBUTED,
    GlooConnections,
    describe_process,
    is_gone,
    signal_pipe,
    standing_place,
    waiting_place,
)
from lightning_muon.sharding.fsdp_call_log import LEFT, Barrier, FsdpCallLog, Tail

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.002  # About the time of one collective of gloo.
_SECONDS_TO_DRAIN = 60.0
_SECONDS_TO_READ = 2.5  # Time for other ranks to read a failure, before the failed rank ends.
_FAILURE = "failure"  # Store key: number of a watchdog, and the failure of a rank that it watched.
_SECONDS_TO_WARN = 15.0  # Wait that is logged, which may be legitimate: checkpoints and compilers mostly take less.
_LOOKS_PER_SIGN = 4  # Two looks a second, and a sign of life every two seconds.
# Share of the timeout after which a silent rank counts as failed, so that this error comes before the backend's.
_SHARE_OF_TIMEOUT = 0.8
_ON_EVERY_RANK = (
    "Call the model (a sample, generate, an evaluation), clip gradients, and save and load checkpoints on every rank, "
    "outside of conditions such as is_global_zero, and leave only what needs no other rank, such as to print, to one. "
    "Ranks that may have different numbers of batches (an IterableDataset) need a limit that all reach, such as "
    "limit_train_batches."
)
_TEXTS_OF_BACKENDS = ("gloo/", "NCCL", "ProcessGroup")  # Paths of source files and class names in messages of torch.


@dataclass(frozen=True, kw_only=True)
class Position:
    """The state that one rank publishes, as JSON."""

    step: int  # Steps and evaluations that this rank has ended.
    shard: int  # The lowest rank with which it shares the weights.
    mesh: int  # The lowest rank with which it shares gradients.
    calls: Tail  # Calls of this step; only ranks in the same step can be compared.
    crossing: Tail  # The calls that all ranks have in common.
    # Name of the process group in whose collective the rank waits, `None` if it does something else. A barrier of the
    # call log counts as a group of its own.
    group: str | None
    counts: Mapping[str, int]  # Collectives launched in each process group.
    kind: str = ""  # Name of that collective's function.
    unit: str = ""  # The FSDP2 unit that it gathers the weights of, as part of a sentence.
    where: str = ""  # The lines of the program that the main thread is in.
    beat: int = 0  # Number of looks since the rank last made progress.
    has_ended: bool = False  # Whether the rank gives no more signs of life: it has left its run, or its step raised.


def find_mismatch(positions: Mapping[int, Position], call_log: FsdpCallLog) -> str | None:
    """The reason why these ranks (global rank -> position) can never meet; ``None`` if they may."""
    # Compare the calls of ranks in the same step: all calls inside each shard group, the common ones over each mesh.
    lists = {
        rank: (((at.step, at.shard), at.calls), ((at.step, at.mesh), at.crossing)) for rank, at in positions.items()
    }
    found = call_log.find_difference(lists, complete=False)
    if found is not None:
        return f"{found} {_ON_EVERY_RANK}{_stand(positions.items())}"
    for pair in combinations(sorted(positions.items()), 2):
        (first, a), (second, b) = pair
        if not _never_meet(a, b):
            continue
        for (rank, at), (other, its) in (pair, pair[::-1]):
            if at.unit and not its.unit:
                return (
                    f"rank {rank} is in a forward pass that rank {other} does not make: it waits for the weights of "
                    f"{at.unit}, which FSDP2 gathers on all ranks together. {_ON_EVERY_RANK}"
                    f"{_stand(positions.items())}"
                )
        places = f"rank {first} {_place(a, call_log)}, rank {second} {_place(b, call_log)}"
        calls = [position.calls[1][-1] for position in (a, b) if position.calls[1]]
        runs_units = any(call is not None and call >= 0 for call in calls)
        advice = call_log.advice(calls) if runs_units else _ON_EVERY_RANK
        return f"The ranks wait for each other in different places: {places}. {advice}{_stand(positions.items())}"
    return None


def _stand(positions: Iterable[tuple[int, Position]]) -> str:
    """Sentences on where each rank is in the program."""
    shown = sorted((rank, at.where) for rank, at in positions if at.where)[:8]
    return "".join(f" Rank {rank}: {where}." for rank, where in shown)


def _never_meet(a: Position, b: Position) -> bool:
    """Whether each rank waits for something that the other one will not launch before it."""
    for one, other in ((a, b), (b, a)):
        # The first needs the weights of a rank that has left the run.
        if one.unit and one.group and other.has_ended and one.counts[one.group] > other.counts.get(one.group, 0):
            return one.step == other.step and one.beat >= 2
    # Each waits in the last collective that it has launched. To be ahead in one group proves nothing: the other one
    # may be slow.
    if a.group is None or b.group is None or a.step != b.step or min(a.beat, b.beat) < 2:
        return False
    if a.group == b.group:
        if a.counts.get(a.group) != b.counts.get(a.group):
            return False
        if a.kind != b.kind and not any(word in at.kind for at in (a, b) for word in ("send", "recv")):
            return True
        # They have logged different numbers of calls that they must have in common.
        if a.shard == b.shard:
            return _length(a.calls) != _length(b.calls)
        return a.mesh == b.mesh and _length(a.crossing) != _length(b.crossing)
    in_both = all(group in position.counts for group in (a.group, b.group) for position in (a, b))
    return in_both and b.counts[a.group] < a.counts[a.group] and a.counts[b.group] < b.counts[b.group]


def _length(calls: Tail) -> int:
    return calls[0] + len(calls[1])


def _place(position: Position, call_log: FsdpCallLog) -> str:
    _, calls = position.calls
    return f"waits after it {call_log.text(calls[-1])}" if calls else "has run no unit in this step"


class Watchdog:
    """A thread that compares where the ranks wait, once this rank has made no progress for ``patience`` seconds.

    A rank without progress publishes its :class:`Position` in the store, and the lowest rank that still trains
    compares. Ranks are stopped only on proof, in two looks ``interval`` seconds apart, that they can never meet: their
    orders of units differ, two wait for each other in different collectives, or one has failed or died (its process is
    gone, as seen from the same host). A rank that loads data or is in a debugger proves nothing while its thread gives
    signs of life. It may be silent and healthy while a library holds the interpreter lock; it counts as failed after
    ``silence``, by default four fifths of the timeout of the default process group.

    Then the communication of all ranks is aborted, so that waiting calls raise, and :meth:`explaining` turns that into
    an error that says why. Every rank must start it, the second one of a process group after the first one and so on.
    """

    def __init__(
        self,
        call_log: FsdpCallLog,
        *,
        patience: float = 4.0,
        interval: float = 0.5,
        silence: timedelta | None = None,
        drain: Callable[[float], None] | None = None,  # Waits for a background save, which communicates.
    ) -> None:
        self._call_log, self._drain = call_log, drain
        self._patience, self._interval = patience, interval
        self._silence = None if silence is None else silence.total_seconds()
        self._closed = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self.stop_reason = ""  # Why communication was aborted on this rank.
        self._failed_at: float | None = None
        self._has_left = False
        self._signals: tuple[int, int] | None = None  # A pipe that gets the number of each signal when it arrives.

    def start(self) -> None:
        """Start to watch. Without a process group of several ranks nothing is watched; local."""
        if self._thread is not None or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        store: Any = default_store()
        self._timeout = store.timeout.total_seconds()
        # A connection of its own: the main thread may wait in the store.
        self._connections = GlooConnections(store.clone())
        store = dist.PrefixStore("lightning_muon_watchdog", store.clone())
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        # The store of all watchdogs of this process group: a rank may fail while others have started the next one.
        self._common = store
        self._number = store.add(f"starts{self._rank}", 1)
        self._store = dist.PrefixStore(str(self._number), store)
        if self._silence is None:
            # Other ranks notice up to ``patience`` seconds after the backend starts to count.
            self._silence = max(
                _SHARE_OF_TIMEOUT * (self._timeout - self._patience), 4 * _LOOKS_PER_SIGN * self._interval
            )
        self._common.set(f"process{self._rank}", describe_process())
        self._store.set(f"alive{self._rank}", "starts")
        self._barrier: Barrier | None = None
        self._barrier_keys: dict[str, str] = {}
        self._num_barriers = Counter[str]()
        self._heard: dict[int, tuple[bytes, float, float]] = {}
        self._processes: list[str] = []
        self._num_waits, self._warned = 0, set[str]()
        self._main = threading.get_ident()
        self._signals = signal_pipe()
        self._thread = threading.Thread(target=self._watch, name="lightning_muon_watchdog", daemon=True)
        self._thread.start()
        self.follow(self._call_log)

    def follow(self, call_log: FsdpCallLog) -> None:
        """Compare the calls of another log; local, alike on all ranks."""
        if call_log.barrier is not None:
            return
        self._num_barriers = Counter({call_log.all_calls.name: 0, call_log.crossing.name: 0})
        self._call_log = call_log
        # Ask the log, not the process groups: with NCCL there are also gloo groups, for messages between hosts.
        if call_log.uses_gloo and self._thread is not None:
            call_log.barrier = self._wait_for_all

    def close(self) -> None:
        """Stop watching; tell the others that this rank waits for nobody; local.

        After a failure, rank 0, which may serve the store, waits some seconds until the others have read why.
        """
        if self._thread is None:
            return
        is_open = not self._closed.is_set()
        self._stop_watching()
        self._thread.join(timeout=2 * self._interval)
        self._thread = None
        if self._signals is not None and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
            for end in self._signals:
                os.close(end)
            self._signals = None
        if self._has_left:
            return
        self._has_left = True
        self._call_log.mark(LEFT)
        # The store may be gone together with its rank.
        with suppress(RuntimeError):
            self._publish(beat=0)
            if is_open:
                self._store.set(f"quiet{self._rank}", "")
            if self._failed_at is not None and self._rank == 0:
                self._wait_until_quiet(self._failed_at + self._seconds_to_tell)
                time.sleep(self._interval)  # A quiet rank looks for the message twice in this time.

    def program_ends(self) -> None:
        """Tell the others of an exception outside of :meth:`explaining` that ends the program; before :meth:`close`."""
        error = getattr(sys, "last_value", None)  # The interpreter has printed it already.
        if isinstance(error, BaseException):
            printed = error.args
            self.failed(error)
            if self.stop_reason and printed != (self.stop_reason,):
                self._write_message()

    def end_with_program(self) -> None:
        """Call :meth:`program_ends` and :meth:`close`; local."""
        self.program_ends()
        self.close()

    def _write_message(self) -> None:
        sys.stderr.write(f"lightning_muon: {self.stop_reason}\n")
        sys.stderr.flush()

    @contextmanager
    def explaining(self) -> Generator[None]:
        """Context that turns errors of aborted collectives into the reason, and reports other errors to all ranks."""
        try:
            yield
        except (StopIteration, GeneratorExit):  # They end an iteration, not a run.
            raise
        except BaseException as error:
            self.failed(error)
            if self.stop_reason and isinstance(error, Exception) and error.args != (self.stop_reason,):
                raise RuntimeError(self.stop_reason) from error
            raise

    def failed(self, error: BaseException) -> None:
        """Tell the others that this rank has failed, and why; stop watching. Local, may wait seconds for a cause."""
        if self._thread is None or self._closed.is_set():
            return
        self._failed_at = time.monotonic()
        asks = _is_of_communication(error)
        with suppress(RuntimeError):
            self._publish(beat=0)
            if asks:
                # The others stop a little later; one of them says why, or none is left that could.
                self._store.set(f"quiet{self._rank}", "")
                self._wait_until_quiet(self._failed_at + self._seconds_to_tell, or_told=True)
                # A rank that knows a cause tells it before it is quiet.
                self.stop_reason = self._told() or self._reason_of_those_that_left()
            if not self.stop_reason:
                self._tell(f"rank {self._rank} has failed: {f'{type(error).__name__}: {error}'[:1000]}")
            if not asks:
                self._store.set(f"quiet{self._rank}", "")
                # A launcher may kill the others as soon as this process ends.
                self._wait_until_read(f"{self._number} {self._told()}", self._failed_at + _SECONDS_TO_READ)
        if asks and self.stop_reason:  # The backend's message on closed connections is not the reason.
            error.args = (self.stop_reason,)
        self._stop_watching()

    @property
    def _seconds_to_tell(self) -> float:
        """Seconds in which all ranks notice that another one has failed."""
        return self._patience + 6 * self._interval

    def _wait_until_quiet(self, deadline: float, *, or_told: bool = False) -> None:
        """Wait until all ranks are quiet or dead, or (``or_told``) one has told why all stop, or to ``deadline``."""
        while time.monotonic() < deadline:
            dead = self._dead()
            talking = [rank for rank in range(self._size) if not self._store.check([f"quiet{rank}"])]
            if or_told and dead:
                self._tell(self._death_of(dead))
            if set(talking) <= set(dead) or (or_told and self._told()):
                break
            time.sleep(self._interval / 2)

    def _wait_until_read(self, failure: str, deadline: float) -> None:
        """Wait until all other living ranks have logged ``failure``, at most to ``deadline``."""
        self._common.set(f"read{self._rank}", failure)
        self._common.set(_FAILURE, failure)
        others = [rank for rank in range(self._size) if rank != self._rank]
        while time.monotonic() < deadline:
            dead = self._dead()
            if all(rank in dead or self._common_value(f"read{rank}") == failure for rank in others):
                break
            time.sleep(self._interval / 10)

    def _common_value(self, key: str) -> str:
        return self._common.get(key).decode() if self._common.check([key]) else ""

    def _told(self) -> str:
        """Why all ranks have to stop; empty if no rank has said so."""
        return self._store.get("stop").decode() if self._store.check(["stop"]) else ""

    def _reason_of_those_that_left(self) -> str:
        """Why communication has failed, if other ranks have ended their runs without error; else empty."""
        positions = {rank: self._read(rank) for rank in range(self._size) if rank != self._rank}
        left = [str(rank) for rank, at in positions.items() if at is not None and at.calls[1][-1:] == [LEFT]]
        ended = f"rank {', '.join(left)} has ended its run, and rank {self._rank} communicates with it"
        return f"{ended}. {_ON_EVERY_RANK}" if left else ""

    def resume(self) -> None:
        """Watch again after :meth:`failed`, once the program has caught the exception; local, on every rank alike."""
        # Where this rank was told to stop, its communication is broken.
        if self._thread is None or self._failed_at is None or self.stop_reason:
            return
        self._thread.join(timeout=2 * self._interval)
        self._thread, self._failed_at = None, None
        self._closed.clear()
        self.start()

    def _stop_watching(self) -> None:
        self._closed.set()
        self._call_log.barrier = None

    def _wait_for_all(self, barrier: Barrier) -> None:
        """Wait at a barrier of the call log. Collective over ``barrier.ranks``."""
        if self._stopped.is_set():
            raise RuntimeError(self.stop_reason)
        name, arrived, size = barrier.name, f"arrived {barrier.name} {barrier[2:]}", len(barrier.ranks)
        self._num_barriers[name] += 1
        self._barrier = barrier
        deadline = time.monotonic() + self._timeout
        num_arrived = self._store.add(arrived, 1)
        while num_arrived < size:
            if self._stopped.wait(_POLL_SECONDS):
                raise RuntimeError(self.stop_reason)
            if time.monotonic() > deadline:
                self._store.add(arrived, -size)  # Ranks that come later must not pass.
                self._publish(beat=1)
                time.sleep(self._interval)  # The other ranks at this barrier publish their positions, too.
                seen = {rank: self._read(rank) for rank in barrier.ranks}
                mine = self._num_barriers[name]
                missing = [str(rank) for rank, at in seen.items() if at is None or at.counts.get(name, 0) < mine]
                raise RuntimeError(
                    f"rank {self._rank} {self._call_log.text(barrier.call)} and has waited {self._timeout:.0f} s for "
                    f"the other ranks to do the same; missing: {', '.join(missing) or 'none any more'}. They have died "
                    "or are slower than the timeout of the process group, an option of the strategy."
                )
            num_arrived = self._store.add(arrived, 0)
        self._barrier = None
        if self._rank == barrier.ranks[0] and name in self._barrier_keys:
            # All ranks are here, so none still reads the key of the previous barrier.
            self._store.delete_key(self._barrier_keys[name])
        self._barrier_keys[name] = arrived

    def _watch(self) -> None:
        """Body of the thread: look, and after some seconds without progress publish, compare, and stop if told to."""
        last, since, beat = None, time.monotonic(), 0
        problem: str | None = None
        told_to_end: float | None = None
        num_looks = 0
        while not self._closed.wait(self._interval):
            now = (self._call_log.step, self._call_log.all_calls.count, waiting_place(self._main))
            # The store may be gone together with its rank: then connections are closed, and all raise anyway.
            with suppress(RuntimeError):
                if num_looks % _LOOKS_PER_SIGN == 0:
                    self._store.set(f"alive{self._rank}", str(num_looks))
                    self._connections.record()
                num_looks += 1
                self._log_failure()
                told_to_end = told_to_end or self._time_of_signal()
                if now != last:
                    last, since, beat, problem, told_to_end = now, time.monotonic(), 0, None, None
                elif time.monotonic() - since >= self._patience - self._interval:
                    beat += 1
                    self._publish(beat)
                    self._look_for_dead_neighbours()
                    found = self._compare()
                    if found is not None and problem is not None:
                        self._tell(found)
                    problem = found
                    if told_to_end is not None and time.monotonic() - told_to_end > self._patience / 2:
                        self._end_if_all_wait()
                    if time.monotonic() - since >= _SECONDS_TO_WARN:
                        self._warn(int(time.monotonic() - since))
                    if self._obey():
                        return

    def _publish(self, beat: int) -> None:
        log, place = self._call_log, waiting_place(self._main)
        unit, where = standing_place(self._main)
        gathers = "" if unit is None else log.name(unit)
        if self._barrier is not None:
            call = self._barrier.call
            gathers = log.name(call // 2) if call >= 0 and call % 2 == 0 else ""
            where = f"waits for the other ranks before it {log.text(call)}, {where}"
        elif place is not None:
            where = f"waits in {place.kind}{' of the weights of ' * bool(gathers)}{gathers}, {where}"
        counts = collective_counts()
        if place != waiting_place(self._main):  # Progress meanwhile: the counts may be those of the next collective.
            place = None
        position = Position(
            step=log.step,
            shard=log.shard_ranks[0],
            mesh=log.ranks[0],
            calls=log.all_calls.tail(),
            crossing=log.crossing.tail(),
            group=self._barrier.name if self._barrier else place and place.group,
            counts={**counts, **self._num_barriers},
            kind="" if place is None else place.kind,
            unit=gathers,
            where=where,
            beat=beat,
            has_ended=self._has_left or self._failed_at is not None,
        )
        self._position = position
        self._store.set(f"position{self._rank}", json.dumps(asdict(position)))

    def _warn(self, seconds: int) -> None:
        """Log once where this rank is, if it waits for other ranks, or another one waits."""
        waits = self._position.group is not None
        num_waits, known = self._store.add("waits", int(waits)), self._num_waits
        self._num_waits = num_waits
        where = self._position.where
        if (waits or 0 < known < num_waits) and where not in self._warned:
            self._warned.add(where)
            others = "" if waits else ", and others wait"
            _log.warning("rank %d has stood in one place for %d s%s: %s", self._rank, seconds, others, where)

    def _time_of_signal(self) -> float | None:
        """The time, if SIGTERM or Ctrl-C has come; Python runs its handler after the main thread's collective."""
        with suppress(BlockingIOError):
            if self._signals and {signal.SIGTERM, signal.SIGINT} & set(os.read(self._signals[0], 64)):
                return time.monotonic()
        return None

    def _end_if_all_wait(self) -> None:
        """End the run after a signal if all ranks wait, and none does something else, such as saving a checkpoint."""
        positions = [(rank, self._read(rank)) for rank in range(self._size)]
        found = {rank: at for rank, at in positions if at is not None}
        if len(found) == self._size and all(at.has_ended or at.group for at in found.values()):
            self._tell(f"rank {self._rank} was told to end by a signal, and all ranks wait.{_stand(found.items())}")

    def _read(self, rank: int) -> Position | None:
        key = f"position{rank}"
        return Position(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _look_for_dead_neighbours(self) -> None:
        """Tell all ranks which processes on this host are gone, which only ranks on this host can see."""
        keys = [f"process{rank}" for rank in range(self._size)]
        if not self._processes and self._common.check(keys):  # All ranks have started a watchdog.
            self._processes = [text.decode() for text in self._common.multi_get(keys)]
        for rank, process in enumerate(self._processes):
            if is_gone(process):
                self._store.set(f"dead{rank}", "")

    def _dead(self) -> list[int]:
        """Ranks whose processes are gone without a report."""
        self._look_for_dead_neighbours()
        positions = {rank: self._read(rank) for rank in range(self._size) if self._store.check([f"dead{rank}"])}
        return [rank for rank, at in positions.items() if at is None or not at.has_ended]

    def _is_silent(self, rank: int) -> bool:
        """Whether the thread of another rank, once heard, has been silent for too long while this rank looked."""
        key = f"alive{rank}"
        if rank == self._rank or not self._store.check([key]):
            return False
        assert self._silence is not None, "start comes first"
        sign, now = self._store.get(key), time.monotonic()
        known, since, looked = self._heard.get(rank, (None, now, now))
        if sign != known or now - looked > self._silence / 2:
            since = now
        self._heard[rank] = sign, since, now
        return now - since > self._silence

    def _compare(self) -> str | None:
        """Proof that ranks will never meet, or ``None``; only the lowest rank that trains and is alive looks for it."""
        dead: list[int] = []
        silent: list[int] = []
        found: dict[int, Position] = {}
        for rank in range(self._size):
            position = self._read(rank)
            if position is not None:
                found[rank] = position
                if position.has_ended:
                    continue
            if self._store.check([f"dead{rank}"]):
                dead.append(rank)
            elif self._is_silent(rank):
                silent.append(rank)
            elif rank < self._rank:
                return None
        if dead:
            return self._death_of(dead)
        if silent:
            return (
                f"rank {', '.join(map(str, silent))} has given no sign of life for {self._silence:.0f} s, and others "
                "wait for it: its process is stopped, its host is gone, or something holds the interpreter lock for "
                "longer than the options timeout and max_silence allow"
            )
        return find_mismatch(found, self._call_log)

    def _tell(self, message: str) -> None:
        """Tell all ranks to stop; the first message stays."""
        # File names that are not UTF-8 give text that cannot be encoded.
        self._store.compare_set("stop", "", message.encode(errors="backslashreplace").decode())

    def _death_of(self, ranks: Iterable[int]) -> str:
        failure = self._common_value(_FAILURE).partition(" ")[2]
        before = f". Before that, {failure}" if failure else ""
        return f"rank {', '.join(map(str, ranks))} has died: its process is gone{before}"

    def _log_failure(self) -> None:
        """Log a failure once; the failed rank waits for it, since this one may be killed before it raises."""
        failure, key = self._common_value(_FAILURE), f"read{self._rank}"
        if failure != self._common_value(key):
            _log.error("rank %d learns: %s", self._rank, failure.partition(" ")[2])
            self._common.set(key, failure)

    def _obey(self) -> bool:
        """Stop if some rank has said so: abort communication, and end the process if that does not help."""
        message = self._told()
        if not message:
            return False
        self.stop_reason = message
        self._stopped.set()
        # Give the others the time to read it before connections close.
        time.sleep(2 * self._interval)
        if self._drain is not None:
            self._drain(_SECONDS_TO_DRAIN)
        with suppress(RuntimeError):  # The store may be gone; then the connections known before count.
            self._connections.record()
        self._connections.abort()
        last, since = None, time.monotonic()
        while not self._closed.wait(self._interval):
            place = waiting_place(self._main)
            if place is None or place != last:
                last, since = place, time.monotonic()
            elif time.monotonic() - since > self._timeout:
                self._write_message()
                _log.error("rank %d ends: %s outlives its timeout of %.0f s", self._rank, place.kind, self._timeout)
                os._exit(1)
        return True


def watch_setup(owner: object, *, silence: timedelta | None, drain: Callable[[float], None] | None = None) -> Watchdog:
    """Start a watchdog for the time before there is a model whose calls it can compare. Collective over all ranks.

    At the end of ``owner``, or of the program, it reports an exception to the other ranks.
    """
    group: Any = dist.group.WORLD
    call_log = FsdpCallLog(nn.Module(), DeviceMesh.from_group(group, "cpu"))
    watchdog = Watchdog(call_log, silence=silence, drain=drain)
    watchdog.start()
    weakref.finalize(owner, watchdog.end_with_program)
    return watchdog


def _is_of_communication(error: BaseException) -> bool:
    """Whether a collective has raised, which may be the consequence of what has happened on another rank."""
    if not isinstance(error, RuntimeError):
        return False
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    # A handle raises where it is waited for, which may be anywhere.
    is_in_torch = bool(files) and TORCH_DISTRIBUTED in files[-1]
    return is_in_torch or any(text in str(error) for text in _TEXTS_OF_BACKENDS)
