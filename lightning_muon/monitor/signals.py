"""Signals that all ranks answer after the same step, whichever ranks have got them."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from lightning_muon.comm.collectives import all_ranks, host_group

_log = logging.getLogger(__name__)
_SECONDS_OF_ONE_PRESS = 2.0  # A terminal sends Ctrl-C to all of its processes, and launchers send it again.
_SECONDS_OF_FIRST_RANK = 60.0  # Timeout for the first rank to end, once it has saved.


class SharedSignals:
    """Runs the handler of a signal on all ranks at the same place of the program, whichever ranks have got the signal.

    A handler that communicates, as Lightning's do (the one for SIGTERM broadcasts, the one for SLURM's requeue saves a
    checkpoint), must not run at once: on each rank it would come between different collectives. Instead, the ranks
    :meth:`tell` each other in one small message beside a step what they have got, and :meth:`answer` after it. A second
    Ctrl-C raises ``KeyboardInterrupt`` at once.

    Made by the main thread of every rank. Collective over all ranks.
    """

    def __init__(self, handlers: Mapping[int, Callable[[int, Any], Any]]) -> None:
        self._handlers, self._process, self._parent = handlers, os.getpid(), os.getppid()
        self._ranks = host_group(all_ranks())
        self._received: list[int] = []  # Signals of this rank whose handlers were not run yet.
        self._pressed: float | None = None  # Time of the first Ctrl-C.
        self._told: tuple[dist.Work | None, torch.Tensor] | None = None
        first = torch.tensor(self._process, device="cpu")
        if self._ranks.group is not None:
            dist.broadcast(first, group=self._ranks.group, group_src=0)
        self._is_child = first.item() == self._parent  # Of the first rank, where Lightning runs its launcher.
        for number in handlers:
            signal.signal(number, self._receive)

    def tell(self) -> None:
        """Begin to tell the others which signal this rank has got; they do the same. Collective over all ranks."""
        if self._told is None:
            number = torch.tensor(max(self._received, default=0), device="cpu")
            work = None
            if self._ranks.group is not None:
                work = dist.all_reduce(number, dist.ReduceOp.MAX, group=self._ranks.group, async_op=True)
            self._told = work, number

    def answer(self) -> None:
        """Run the handler of a signal that any rank has told of. Collective over all ranks."""
        if self._told is None:
            return
        (work, told), self._told = self._told, None
        if work is not None:
            work.wait()
        number = int(told)
        if not number:
            return
        self._received = [each for each in self._received if each != number]
        if self._is_child:
            atexit.register(self._wait_for_parent)
        self._handlers[number](number, None)

    @property
    def unanswered(self) -> list[int]:
        """Signals of this rank whose handlers were not run yet; local."""
        return list(self._received)

    def _wait_for_parent(self) -> None:
        """Lightning's launcher, in the first rank, kills that rank when another one ends with an exit code."""
        deadline = time.monotonic() + _SECONDS_OF_FIRST_RANK
        while os.getppid() == self._parent and time.monotonic() < deadline:
            time.sleep(0.1)

    def _receive(self, number: int, frame: Any) -> None:
        if os.getpid() != self._process:  # A forked process has inherited the handler, but no batches.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._received.append(number)
        if number != signal.SIGINT:
            return
        now = time.monotonic()
        if self._pressed is not None and now - self._pressed > _SECONDS_OF_ONE_PRESS:
            signal.default_int_handler(signal.SIGINT, frame)
        if self._pressed is None:
            self._pressed = now
            if self._ranks.group is None or dist.get_rank() == 0:
                _log.warning("Ctrl-C: all ranks end after the same batch; press it again to end at once")


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

        Every rank must call it alike after each of its batches: it sends one small message.
        """
        if dist.is_initialized() and dist.get_world_size() != self._size:
            raise RuntimeError("StopSignals was entered before the process group was there; enter it after the launch")
        if not self._number:
            self._shared.tell()
            self._shared.answer()
        return bool(self._number)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
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
