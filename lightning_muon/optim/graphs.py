"""Newton-Schulz on CUDA as one launch: a graph of its twenty kernels, which the host would launch one by one.

A 512 x 2048 matrix takes an H200 0.12 ms, and a host that launches a kernel in 10 us 0.7 ms (``make gpu``).
"""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_muon.math.newton_schulz import NewtonSchulz

# Above it the device takes longer than the host (2 ms at 700 TFLOP/s), and the memory of a graph is better spent.
_MOST_FLOPS = 15 * 10**11
_MOST_GRAPHS = 64


def can_record(device: torch.device) -> bool:
    """Whether launches become a graph: not on a host that waits for each kernel, to find the one that fails."""
    return device.type == "cuda" and os.environ.get("CUDA_LAUNCH_BLOCKING") != "1"


class NewtonSchulzGraph:
    """Matrices of one shape (batch, rows, cols): fill ``matrices``, then :meth:`replay`. The bits are the same.

    What :meth:`replay` returns is overwritten by the next one. Local; the host waits for the device when it is made.
    """

    def __init__(self, matrices: Tensor, newton_schulz: NewtonSchulz, *, eps: float, pool: Any) -> None:
        self.matrices = matrices
        orthogonalize = partial(newton_schulz.orthogonalize, matrices, eps=eps)
        orthogonalize()  # cuBLAS allocates at its first call, which a graph must not.
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may go on with CUDA: those of data loaders, and NCCL's.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._updates = orthogonalize().contiguous()  # A tall matrix comes out transposed.

    def replay(self) -> Tensor:
        """The updates of what is in ``matrices``."""
        self._graph.replay()
        return self._updates


class NewtonSchulzGraphs:
    """The graphs of an optimizer, made when a shape comes up. They share memory, and so must run one by one."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[tuple[object, ...], NewtonSchulzGraph] = {}
        self._taken = Counter[tuple[object, ...]]()

    def begin(self) -> None:
        """Let :meth:`take` give all graphs again: nothing that one of them has returned is needed any more."""
        self._taken.clear()

    def take(self, shape: tuple[int, int, int], newton_schulz: NewtonSchulz, *, eps: float) -> NewtonSchulzGraph | None:
        """A graph that was not taken since :meth:`begin`; ``None`` if launches one by one are as good."""
        num, rows, cols = shape
        if num * newton_schulz.flops(rows, cols) > _MOST_FLOPS:
            return None
        key = (shape, newton_schulz, eps)
        self._taken[key] += 1
        numbered = (*key, self._taken[key])
        if numbered not in self._graphs and len(self._graphs) < _MOST_GRAPHS:
            matrices = torch.zeros(shape, dtype=self._dtype, device=self._device)
            self._graphs[numbered] = NewtonSchulzGraph(matrices, newton_schulz, eps=eps, pool=self._pool)
        return self._graphs.get(numbered)
