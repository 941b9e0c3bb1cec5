"""Records when the ops of a real step begin and end on this rank, as spans like the simulator's."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from lightning_muon.schedule.program import Op
from lightning_muon.schedule.simulate import Span

_LATEST_END_SECONDS = 30.0


class TimelineRecorder:
    """Records when each op of the calling rank starts and ends; set it as ``executor.recorder``.

    On CUDA the clock is that of the device, synchronized with the host's once when recording begins.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._changed = threading.Condition()
        self._starts: dict[Op, Any] = {}
        self._ends: dict[Op, Any] = {}
        if self._is_cuda:
            torch.cuda.synchronize()
            self._origin = (time.monotonic(), self._now())
            torch.cuda.synchronize()

    def started(self, op: Op) -> None:
        """Call it before the action, with the stream of the op current on CUDA."""
        self._starts[op] = self._now()

    def ended(self, op: Op) -> None:
        """Call it when the op has ended (CPU, maybe in a thread of the backend) or its end is queued (CUDA)."""
        now = self._now()
        with self._changed:
            self._ends[op] = now
            self._changed.notify_all()

    def spans(self) -> list[Span]:
        """The recorded spans, in order of issue, in seconds of the host's clock; waits until all ops have ended."""
        with self._changed:
            # A rank that waited for a communication continues a moment before the backend's thread reports its end.
            if not self._changed.wait_for(lambda: len(self._ends) == len(self._starts), _LATEST_END_SECONDS):
                missing = [op.name for op in self._starts if op not in self._ends]
                raise RuntimeError(f"{missing[:4]} had not ended {_LATEST_END_SECONDS} s after the step")
            if self._is_cuda:
                torch.cuda.synchronize()
            return [Span(op, self._seconds(at), self._seconds(self._ends[op])) for op, at in self._starts.items()]

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, moment: Any) -> float:
        if not self._is_cuda:
            return moment
        seconds, event = self._origin
        return seconds + event.elapsed_time(moment) / 1e3
