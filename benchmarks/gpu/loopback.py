"""A process group for one process that plays rank 0 of many: all other ranks are taken to hold the same as this one.

What is sent is copied on a stream of the group's own, as NCCL does it, so streams, launches, buffers and waiting are
those of a real rank on this device. What comes back is made up, but finite: sums are right for equal ranks, an uneven
all-to-all gives small random numbers. Times have no network in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_muon.comm import collectives
from lightning_muon.compat.torch import new_group

NAME = "loopback"


class LoopbackWork(dist.Work):
    """A handle as NCCL's: waiting lets the current stream wait, and not the host."""

    def __init__(self, event: torch.cuda.Event | None, kept: Sequence[Tensor]) -> None:
        super().__init__()
        self._event, self._kept = event, tuple(kept)

    def wait(self, timeout: Any = None) -> bool:
        """Let the current stream wait, and let go of the tensors."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        self._kept = ()
        return True

    def is_completed(self) -> bool:
        return self._event is None or self._event.query()

    def is_success(self) -> bool:
        return True

    def get_future(self) -> Future[list[Tensor]]:
        future: Future[list[Tensor]] = Future()
        future.set_result(list(self._kept))
        return future


class LoopbackGroup(dist.ProcessGroup):
    """Rank 0 of ``size``; the names of the methods are torch's, those of 2.11 to 2.14."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._count = size
        self._name = ""
        self._stream: torch.cuda.Stream | None = None

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _get_backend(self, device: torch.device) -> LoopbackGroup:
        """Torch 2.14 asks it whether messages are sent together."""
        return self

    @property
    def group_name(self) -> str:
        return self._name

    @contextmanager
    def _on_stream(self, device: torch.device) -> Iterator[list[torch.cuda.Event]]:
        """Run on the stream of the group, after the current one; the list gets the event of the end."""
        events: list[torch.cuda.Event] = []
        if device.type != "cuda":
            yield events
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield events
            events.append(self._stream.record_event())

    def _copied(self, pairs: Sequence[tuple[Tensor, Tensor]], scale: int = 1) -> LoopbackWork:
        """A handle for ``output = input * scale`` of each pair; shapes may differ, sizes not."""
        tensors = [tensor for pair in pairs for tensor in pair]
        with torch.no_grad(), self._on_stream(tensors[0].device) as events:
            for output, source in pairs:
                if output.data_ptr() != source.data_ptr():
                    output.view(-1).copy_(source.reshape(-1))
                if scale != 1:
                    output.mul_(scale)
        return LoopbackWork(events[0] if events else None, tensors)

    def _scale(self, op: Any) -> int:
        return self._count if op == dist.ReduceOp.SUM else 1

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> LoopbackWork:
        return self._copied([(tensor, tensor) for tensor in tensors], self._scale(opts.reduceOp))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> LoopbackWork:
        return self._copied([(tensor, tensor) for tensor in tensors])

    def barrier(self, opts: Any = None) -> LoopbackWork:
        return LoopbackWork(None, ())

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> LoopbackWork:
        pairs = [(output, source) for each, source in zip(outputs, inputs, strict=True) for output in each]
        return self._copied(pairs)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> LoopbackWork:
        return self._copied([(part, source) for part in output.view(self._count, -1)])

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> LoopbackWork:
        part = source.view(self._count, -1)[0]
        return self._copied([(output, part)], self._scale(opts.reduceOp))

    def all_to_all_single(
        self, output: Tensor, source: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> LoopbackWork:
        """Small random numbers, and zeros for integers; the own part is copied by the package itself."""
        with torch.no_grad(), self._on_stream(output.device) as events:
            if output.is_floating_point():
                output.normal_(std=1e-3)
            else:
                output.zero_()
        return LoopbackWork(events[0] if events else None, (output, source))

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> LoopbackWork:
        return self._copied([(tensor, tensor) for tensor in tensors])

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> LoopbackWork:
        with torch.no_grad(), self._on_stream(tensors[0].device) as events:
            for tensor in tensors:
                tensor.zero_()
        return LoopbackWork(events[0] if events else None, tensors)

    # As torch 2.11 and 2.12 call them.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def _create(store: dist.Store, rank: int, size: int, timeout: Any) -> LoopbackGroup:
    del store, timeout
    return LoopbackGroup(rank, size)


@contextmanager
def loopback_world(size: int) -> Iterator[None]:
    """A world of ``size`` ranks of which this process is rank 0; every group of it is a loopback, also "gloo" ones."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, devices=["cpu", "cuda"])
    dist.init_process_group(NAME, store=dist.HashStore(), rank=0, world_size=size)

    def loopback_group(ranks: Sequence[int], name: str, *, backend: str, timeout: timedelta) -> Any:
        del backend  # A gloo group, for flags in the memory of the host, would wait for the other ranks.
        return new_group(ranks, name, backend=NAME, timeout=timeout)

    try:
        with mock.patch.multiple(collectives, new_group=loopback_group, world_timeout=lambda: timedelta(minutes=1)):
            yield
    finally:
        dist.destroy_process_group()
