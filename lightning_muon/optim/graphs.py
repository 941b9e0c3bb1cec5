"""Newton-Schulz on CUDA as one launch: a graph of its twenty kernels, which the host would launch one by one.

A 512 x 2048 matrix takes 0.11 ms as a graph and 0.39 ms kernel by kernel (an H200, ``make gpu``).
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_muon.math.newton_schulz import NewtonSchulz

# Above it the device takes longer than the host (3.5 ms at 700 TFLOP/s), and the memory of a graph is better spent.
MOST_FLOPS = 25 * 10**11
_MOST_GRAPHS = 64


_log = logging.getLogger(__name__)


def can_record(device: torch.device) -> bool:
    """Whether launches become a graph: not if the host waits for each kernel, or memory has no pools; nor on ROCm."""
    off = [os.environ.get(name, "0") for name in ("CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING")]
    return device.type == "cuda" and torch.version.hip is None and all(each in ("", "0") for each in off)


Recorded = tuple[Tensor, Callable[[], Tensor]]
"""Matrices (batch, rows, cols) to fill, and what gives their updates, with the bits of launches one by one. Updates are
overwritten by the next call."""


class NewtonSchulzGraphs:
    """The graphs of an optimizer, made when a shape comes up. They share memory, and so must run one by one."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        self._has_failed = False
        self._graphs: dict[tuple[object, ...], Recorded] = {}
        self._taken = Counter[tuple[object, ...]]()

    def close(self) -> None:
        """Free all graphs and their memory."""
        self._graphs.clear()

    def begin(self) -> None:
        """Let :meth:`take` give all graphs again: nothing that one of them has returned is needed any more."""
        self._taken.clear()

    def take(self, shape: tuple[int, int, int], newton_schulz: NewtonSchulz, *, eps: float) -> Recorded | None:
        """A graph that was not taken since :meth:`begin`; ``None`` if launches one by one are as good."""
        num, rows, cols = shape
        if self._has_failed or num * newton_schulz.flops(rows, cols) > MOST_FLOPS:
            return None
        key = (shape, newton_schulz, eps)
        self._taken[key] += 1
        numbered = (*key, self._taken[key])
        if numbered not in self._graphs and len(self._graphs) < _MOST_GRAPHS:
            try:
                self._graphs[numbered] = self._record(shape, newton_schulz, eps)
            except RuntimeError as error:  # Of memory, or of a tool that watches each kernel.
                self._has_failed = True
                _log.warning("Newton-Schulz is launched kernel by kernel, since it cannot be recorded: %s", error)
        return self._graphs.get(numbered)

    def _record(self, shape: tuple[int, int, int], newton_schulz: NewtonSchulz, eps: float) -> Recorded:
        """Record a graph; the host waits for the device."""
        matrices, graph = torch.zeros(shape, dtype=self._dtype, device=self._device), torch.cuda.CUDAGraph()

        def run() -> Tensor:
            return newton_schulz.orthogonalize(matrices, eps=eps).contiguous()  # A tall one comes out transposed.

        # A recording that fails leaves its stream the current one.
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.current_stream(self._device)):
            run()  # What is loaded and allocated at a first call must not be in a graph.
            # Other threads may go on with CUDA: those of data loaders, and NCCL's.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                updates = run()

        def replay() -> Tensor:
            graph.replay()
            return updates

        return matrices, replay
