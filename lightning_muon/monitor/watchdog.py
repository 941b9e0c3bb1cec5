"""Ends a run within ten seconds if ranks wait for each other in different units, with an error that names these."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import combinations
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_muon.checkpoint.saving import THREAD
from lightning_muon.compat.torch import abort_device_groups, collective_counts, default_store
from lightning_muon.monitor.processes import (
    TORCH_DISTRIBUTED,
    describe_process,
    is_gone,
    standing_place,
    waiting_place,
)
from lightning_muon.sharding.guards import ADVICE, LEFT, CallLog, Calls, Guard

_log = logging.getLogger(__name__)
EXIT_CODE = 1  # Of a rank that is ended.
_SECONDS_TO_READ = 2.5  # Time for other ranks to read why all end, before the rank that knows it ends.
_SECONDS_TO_SAVE = 60.0  # Time for a checkpoint that is being written beside the training.
_SECONDS_TO_WARN = 15.0  # Wait that is logged, which may be legitimate: checkpoints and compilers mostly take less.
_LOOKS_PER_SIGN = 4  # Two looks a second, and a sign of life every two seconds.
# Share of the timeout after which a silent rank counts as failed, so that this error comes before the backend's.
_SHARE_OF_TIMEOUT = 0.8
_REASON = "reason"  # Store key: the rank that says why all have to end, the time, and why.
_ON_EVERY_RANK = (
    "Call the model (a sample, generate, an evaluation), clip gradients, and save and load checkpoints on every rank, "
    "outside of conditions such as is_global_zero, and leave only what needs no other rank, such as to print, to one. "
    "Ranks that may have different numbers of batches (an IterableDataset) need a limit that all reach, such as "
    "limit_train_batches."
)
_TEXTS_OF_BACKENDS = ("gloo/", "NCCL", "ProcessGroup")  # Paths of source files and class names in messages of torch.


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Position:
    """The state that one rank publishes, as JSON."""

    step: int  # Steps and evaluations that this rank has ended.
    mesh: int  # The lowest rank with which it shares weights and gradients.
    calls: Calls  # Calls of this step; only ranks in the same step can be compared.
    news: str  # What it has done otherwise than in earlier steps, if anything.
    group: str | None  # Name of the process group in whose collective the rank waits, `None` if it does something else.
    counts: Mapping[str, int]  # Collectives launched in each process group.
    kind: str = ""  # Name of that collective's function.
    unit: str = ""  # The FSDP2 unit that it gathers the weights of, as part of a sentence.
    where: str = ""  # The lines of the program that the main thread is in.
    beat: int = 0  # Number of looks since the rank last made progress.
    has_ended: bool = False  # Whether the rank gives no more signs of life: it has left its run, or its step raised.


def _position(value: bytes) -> Position:
    fields = json.loads(value)
    at = Position(**{**fields, "calls": Calls(*fields["calls"])})
    numbers, texts = (
        [at.step, at.mesh, at.beat, at.calls.count, *at.calls.last, *at.counts.values()],
        [at.news, at.kind, at.unit],
    )
    is_of_us = all(isinstance(each, int) for each in numbers) and all(isinstance(each, str) for each in texts)
    if not is_of_us or not isinstance(at.group or "", str):
        raise ValueError("no position of a rank")
    return at


def _process(value: bytes) -> str:
    is_gone(value.decode())  # Raises if that is no process.
    return value.decode()


def _reason(value: bytes) -> str:
    _rank, _time, _why = value.decode().split(" ", 2)
    return value.decode()


def find_mismatch(positions: Mapping[int, Position], call_log: CallLog) -> str | None:
    """The reason why these ranks (global rank -> position) can never meet; ``None`` if they may."""
    of_mesh: dict[tuple[int, int], dict[int, Calls]] = {}
    for rank, at in positions.items():  # Only those in the same step can be compared.
        of_mesh.setdefault((at.step, at.mesh), {})[rank] = at.calls
    for calls in of_mesh.values():
        if found := call_log.find_difference(calls, complete=False):
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
        advice = _advice((a, b))
        return f"The ranks wait for each other in different places: {places}. {advice}{_stand(positions.items())}"
    return None


def _advice(positions: Iterable[Position]) -> str:
    calls = [position.calls.last[-1] for position in positions if position.calls.last]
    return ADVICE if any(call >= 0 for call in calls) else _ON_EVERY_RANK


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
        # They have logged different numbers of calls.
        return a.mesh == b.mesh and a.calls.count != b.calls.count
    in_both = all(group in position.counts for group in (a.group, b.group) for position in (a, b))
    return in_both and b.counts[a.group] < a.counts[a.group] and a.counts[b.group] < b.counts[b.group]


def _place(position: Position, call_log: CallLog) -> str:
    return f"waits after it {_last_text(position, call_log)}" if position.calls.last else _last_text(position, call_log)


def _last_text(position: Position, call_log: CallLog) -> str:
    last = position.calls.last
    return call_log.text(last[-1]) if last else "has run no unit in this step"


class Watchdog(Guard):
    """A thread that compares where the ranks wait, once this rank has made no progress for ``patience`` seconds.

    A rank without progress publishes its :class:`Position` in the store, and the lowest rank that still trains
    compares. Ranks are ended only on proof that they can never meet: in two looks ``interval`` seconds apart their
    orders of units differ, or two wait for each other in different collectives; or one has failed or died (its process
    is gone, as seen from the same host). A rank that loads data or is in a debugger proves nothing while its thread
    gives signs of life. It may be silent and healthy while a library holds the interpreter lock; it counts as failed
    after ``silence``, by default four fifths of the timeout of the default process group.

    Every rank then logs the reason, with the line of the program in which each rank stands, and its process ends with
    an exit code; one that still makes progress does when it makes no more. A rank that has failed by itself ends with
    its own exception. Every rank must start it, the second one of a process group after the first one and so on.
    """

    def __init__(
        self,
        call_log: CallLog,
        *,
        patience: float = 4.0,
        interval: float = 0.5,
        silence: timedelta | None = None,
    ) -> None:
        self._call_log = call_log
        self._patience, self._interval = patience, interval
        self._silence = None if silence is None else silence.total_seconds()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_failed = self._has_left = False
        self._store: Any = None
        self.follow(call_log)

    # ---- events; local

    def start(self) -> None:
        """Start to watch, or start anew after a failure; a single rank watches nothing."""
        if self._thread is not None or self._has_left or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        if self._store is None:
            store: Any = default_store()
            if self._silence is None:
                # Other ranks notice up to ``patience`` seconds after the backend starts to count.
                seconds = _SHARE_OF_TIMEOUT * (store.timeout.total_seconds() - self._patience)
                self._silence = max(seconds, 4 * _LOOKS_PER_SIGN * self._interval)
            self._rank, self._size = dist.get_rank(), dist.get_world_size()
            # A connection of its own: the main thread may wait in the store. It is that of all watchdogs of this
            # process group: a rank may fail while others have started the next one.
            self._common = dist.PrefixStore("lightning_muon_watchdog", store.clone())
            self._store = dist.PrefixStore(str(self._common.add(f"starts{self._rank}", 1)), self._common)
            self._common.set(f"process{self._rank}", describe_process())
            self._store.set(f"alive{self._rank}", "starts")
            self._heard: dict[int, tuple[bytes, float, float]] = {}
            self._processes: list[str] = []
            self._warned = set[str]()
            self._main = threading.get_ident()
        said, failed = self._said(), f"failed{self._rank}"
        has_failed = self._value(failed) != ""
        self._common.set(failed, "")
        if said.startswith(f"{self._rank} "):  # This rank goes on.
            self._common.set(_REASON, "")
        # Ranks that have failed together may go on together.
        self._learned = self._before = said if has_failed else ""
        self._known, self._has_failed = "", False
        self._closed.clear()
        self._thread = threading.Thread(target=self._watch, name="lightning_muon_watchdog", daemon=True)
        self._thread.start()
        self._publish_order()

    def follow(self, call_log: CallLog) -> None:
        """Compare the calls of another log; alike on all ranks."""
        self._call_log = call_log
        call_log.on_new_order = self._publish_order
        self._publish_order()

    @override
    def failed(self, error: BaseException) -> None:
        """Tell the others that this rank has failed, and why; stop watching. May wait seconds for a cause.

        If it has failed in a collective because of another rank, the process ends here.
        """
        if self._thread is None:
            return
        self._stop_watching()
        self._has_failed = True
        with suppress(RuntimeError):  # The store may be gone together with its rank.
            self._publish(beat=0)
        if _is_of_communication(error) and (reason := self._reason()):
            self._end(reason)
        with suppress(RuntimeError):
            self._common.set(f"failed{self._rank}", "yes")
            self._tell(f"rank {self._rank} has failed: {f'{type(error).__name__}: {error}'[:1000]}")
            self._wait_until_read()  # A launcher may kill the others as soon as this process ends.

    @override
    def close(self) -> None:
        """Stop watching; tell the others that this rank waits for nobody."""
        if self._has_left or self._store is None:
            return
        self._stop_watching()
        self._has_left = True
        with suppress(RuntimeError):
            self._call_log.leaves_run()
            self._publish(beat=0)
        self._call_log.on_new_order = lambda: None

    def program_ends(self) -> None:
        """Tell the others of an exception that ends the program, outside of all that the engine watches."""
        error = getattr(sys, "last_value", None)  # The interpreter has printed it already.
        if isinstance(error, BaseException):
            self.failed(error)

    def end_with_program(self) -> None:
        """Call :meth:`program_ends` and :meth:`close`."""
        self.program_ends()
        self.close()

    def _stop_watching(self) -> None:
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * self._interval)
        self._thread = None

    # ---- the thread

    def _watch(self) -> None:
        """Body of the thread: look, and after some seconds without progress publish, compare, and maybe end."""
        last, since, beat = None, time.monotonic(), 0
        problem: str | None = None
        num_looks = 0
        while not self._closed.wait(self._interval):
            now = (self._call_log.step, self._call_log.calls().count, waiting_place(self._main))
            if now != last:
                last, since, beat, problem = now, time.monotonic(), 0, None
            seconds = time.monotonic() - since
            is_stuck = seconds >= self._patience - self._interval
            try:
                if num_looks % _LOOKS_PER_SIGN == 0:
                    self._store.set(f"alive{self._rank}", str(num_looks))
                num_looks += 1
                reason = self._learn()
                if is_stuck:
                    beat += 1
                    self._publish(beat)
                    if dead := self._dead():
                        self._tell(self._death_of(dead))
                    found = self._compare()
                    if found is not None and problem is not None:
                        self._tell(found)
                    problem = found
                    if seconds >= _SECONDS_TO_WARN:
                        self._warn(int(seconds))
            except RuntimeError:
                reason = self._reason_without_store()
            except Exception as error:  # What a stranger has written into the store may be anything.
                reason = ""
                self._passes_over("a position", error)
            if reason and is_stuck and not self._closed.is_set():
                self._end(reason)

    def _publish_order(self) -> None:
        """Publish the calls, of which one is in a new order, before this process may be ended by what follows."""
        if self._thread is not None:
            with suppress(RuntimeError):
                self._publish(beat=0)

    def _publish(self, beat: int) -> None:
        log, place = self._call_log, waiting_place(self._main)
        unit, where = standing_place(self._main)
        gathers = "" if unit is None else log.name(unit)
        if place is not None:
            where = f"waits in {place.kind}{' of the weights of ' * bool(gathers)}{gathers}, {where}"
        counts = collective_counts()
        if place != waiting_place(self._main):  # Progress meanwhile: the counts may be those of the next collective.
            place = None
        position = Position(
            step=log.step,
            mesh=log.ranks[0],
            calls=log.calls(),
            news=log.news,
            group=place and place.group,
            counts=counts,
            kind="" if place is None else place.kind,
            unit=gathers,
            where=where,
            beat=beat,
            has_ended=self._has_left or self._has_failed,
        )
        self._position = position
        self._store.set(f"position{self._rank}", json.dumps(asdict(position)))

    def _read(self, rank: int) -> Position | None:
        return self._take(self._store, f"position{rank}", _position)

    def _take(self, store: Any, key: str, read: Callable[[bytes], T]) -> T | None:
        """What ``read`` makes of a value in the store; ``None``, too, if no watchdog has written it, which ends it."""
        value = store.get(key) if store.check([key]) else b""
        try:
            return read(value) if value else None
        except (ValueError, TypeError, LookupError, AttributeError) as problem:
            self._passes_over(key, problem)
            store.compare_set(key, value, "")
        return None

    def _passes_over(self, what: str, problem: Exception) -> None:
        """Log once that something in the store cannot be read."""
        if what not in self._warned:
            self._warned.add(what)
            text = "rank %d passes over what is in the store as %s, for it cannot be read (%s)"
            _log.error(text, self._rank, what, problem)

    def _positions(self) -> dict[int, Position]:
        positions = ((rank, self._read(rank)) for rank in range(self._size))
        return {rank: position for rank, position in positions if position is not None}

    def _warn(self, seconds: int) -> None:
        """Log once where this rank is, if it waits for other ranks, or another one waits."""
        own = self._position
        waiting = [rank for rank, at in self._positions().items() if at.group is not None and at.step == own.step]
        if waiting and own.where not in self._warned:
            self._warned.add(own.where)
            others = "" if self._rank in waiting else ", and others wait"
            _log.warning("rank %d has stood in one place for %d s%s: %s", self._rank, seconds, others, own.where)

    # ---- proof that ranks never meet

    def _compare(self) -> str | None:
        """Proof that ranks will never meet, or ``None``; only the lowest rank that trains looks for it."""
        found, silent = self._positions(), list[int]()
        for rank in range(self._size):
            if rank in found and found[rank].has_ended:
                continue
            if self._is_silent(rank):
                silent.append(rank)
            elif rank < self._rank:
                return None
        if silent:
            return (
                f"rank {', '.join(map(str, silent))} has given no sign of life for {self._silence:.0f} s, and others "
                "wait for it: its process is stopped, its host is gone, or something holds the interpreter lock for "
                "longer than the options timeout and max_silence allow"
            )
        return find_mismatch(found, self._call_log)

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

    def _dead(self) -> list[int]:
        """Ranks whose processes on this host are gone without a report."""
        keys = [f"process{rank}" for rank in range(self._size)]
        if not self._processes and self._common.check(keys):  # All ranks have started a watchdog.
            self._processes = [self._take(self._common, key, _process) or "" for key in keys]
        positions = {rank: self._read(rank) for rank in self._gone()}
        return [rank for rank, at in positions.items() if at is None or not at.has_ended]

    def _gone(self) -> list[int]:
        return [rank for rank, process in enumerate(self._processes) if process and is_gone(process)]

    def _death_of(self, ranks: Iterable[int]) -> str:
        positions, log = self._positions(), self._call_log
        death = f"rank {', '.join(map(str, ranks))} has died: its process is gone."
        if found := find_mismatch(positions, log):
            return f"{death} {found}"
        step = max((at.step for at in positions.values()), default=0)
        latest = {rank: at for rank, at in positions.items() if at.step == step}
        said = {rank: at.news or _last_text(at, log) for rank, at in latest.items()}
        if len(set(said.values())) > 1 or any(at.news for at in latest.values()):
            differ = "; ".join(f"rank {rank} {text}" for rank, text in said.items())
            death += f" Ranks that do different things may end so: {differ}. {_advice(latest.values())}"
        return f"{death}{_stand(positions.items())}"

    # ---- the end of all ranks

    def _said(self) -> str:
        return self._take(self._common, _REASON, _reason) or ""

    def _value(self, key: str) -> str:
        return self._take(self._common, key, bytes.decode) or ""

    def _tell(self, reason: str) -> None:
        """Tell all ranks to end; the first reason stays."""
        said = self._said()
        # File names that are not UTF-8 give text that cannot be encoded.
        text = f"{self._rank} {time.time()} {reason}".encode(errors="backslashreplace").decode()
        self._common.compare_set(_REASON, said if said == self._before else "", text)

    def _learn(self) -> str:
        """Why all ranks have to end, if any has said so since this one began; logged once."""
        said = self._said()
        if said in ("", self._before):
            return ""
        self._known = reason = said.split(" ", 2)[2]
        if said != self._learned:
            self._learned = said
            if not said.startswith(f"{self._rank} "):
                _log.error("rank %d learns: %s", self._rank, reason)
            self._common.set(f"read{self._rank}", said)
        return reason

    def _wait_until_read(self) -> None:
        """Wait some seconds until all other living ranks have logged why all end."""
        said, deadline = self._said(), time.monotonic() + _SECONDS_TO_READ
        self._common.set(f"read{self._rank}", said)
        while time.monotonic() < deadline:
            keys = {rank: f"read{rank}" for rank in range(self._size) if rank not in self._dead()}
            if all(self._value(key) == said for key in keys.values()):
                break
            time.sleep(self._interval / 10)

    def _reason(self) -> str:
        """Why communication has failed on this rank, from the others; empty if no rank knows.

        They notice a little later that a rank has failed or died; or all have failed alike, or have ended their runs.
        """
        deadline = time.monotonic() + self._patience + 6 * self._interval
        with suppress(RuntimeError):
            self._store.set(f"asks{self._rank}", "")
            while time.monotonic() < deadline:
                positions = self._positions()
                found = find_mismatch(positions, self._call_log) or ""
                if all(self._store.check([f"asks{rank}"]) for rank in range(self._size)):
                    return found
                if reason := self._learn() or found:
                    return reason
                if dead := self._dead():
                    return self._death_of(dead)
                left = [str(rank) for rank, at in positions.items() if at.calls.last[-1:] == [LEFT]]
                if left:
                    ended = f"rank {', '.join(left)} has ended its run, and rank {self._rank} communicates with it"
                    return f"{ended}. {_ON_EVERY_RANK}{_stand(positions.items())}"
                time.sleep(self._interval / 2)
            return ""
        return self._reason_without_store()

    def _reason_without_store(self) -> str:
        """What is known when the store is gone, together with the rank that has served it."""
        gone = ", ".join(map(str, self._gone()))
        return self._known or (f"rank {gone} has ended: its process is gone" if gone else "")

    def _end(self, reason: str) -> NoReturn:
        """End this process, as the others end theirs; a checkpoint that is being written is finished before."""
        for thread in threading.enumerate():
            if thread.name == THREAD:
                thread.join(_SECONDS_TO_SAVE)
        with suppress(RuntimeError):
            self._tell(reason)
            if self._rank == 0:  # It may serve the store.
                self._wait_until_read()
        sys.stderr.write(f"lightning_muon: rank {self._rank} ends: {reason}\n")
        # Neither may keep this process: a device may wait, or the main thread may hold the lock of a log.
        last = threading.Thread(target=lambda: (logging.shutdown(), abort_device_groups()), daemon=True)
        last.start()
        last.join(_SECONDS_TO_READ)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_CODE)


def watch_setup(owner: object, *, silence: timedelta | None) -> Watchdog:
    """Start a watchdog for the time before there is a model whose calls it can compare. Collective over all ranks.

    At the end of ``owner``, or of the program, it reports an exception to the other ranks.
    """
    group: Any = dist.group.WORLD
    watchdog = Watchdog(CallLog(nn.Module(), DeviceMesh.from_group(group, "cpu")), silence=silence)
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
