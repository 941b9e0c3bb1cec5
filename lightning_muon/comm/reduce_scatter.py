"""Reduce-scatter: sums over ranks, of which each rank gets its own part.

It is an all-to-all and sums on the receiving rank. Measured on gloo it takes a half to a quarter of the time of
``reduce_scatter_tensor``; it takes parts of any size without padding, and the order of the additions does not depend
on the backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_muon.comm.collectives import start_all_reduce_sum, start_all_to_all
from lightning_muon.comm.groups import AxisGroup


def flat_gradient(parameter: Tensor, gradient: Tensor | None) -> Tensor:
    """The flattened gradient, dense and in the dtype of the parameter; ``None`` stands for zeros."""
    if gradient is None:
        return torch.zeros(1, dtype=parameter.dtype, device=parameter.device).expand(parameter.numel())
    dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
    return dense.detach().to(parameter.dtype).reshape(-1)


class SideStream:
    """A CUDA stream for work that follows a communication, so that backward does not wait; on the CPU a no-op."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.is_asynchronous = self._stream is not None  # Waiting inside of `use` returns at once.

    @contextmanager
    def use(self, *tensors: Tensor) -> Iterator[None]:
        """Context on the side stream, after work queued on the current one; ``tensors`` stay alive until it is done."""
        if self._stream is None:
            yield
            return
        for tensor in tensors:
            tensor.record_stream(self._stream)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def record(self) -> torch.Event | None:
        """An event after all work that was queued on the side stream so far."""
        return None if self._stream is None else self._stream.record_event()


class PendingSum:
    """A pending sum over ``group``, of which each rank gets a part, and then over ``replicate``.

    ``counts`` are the elements that each rank of ``group`` keeps. A rank sends ``others`` (1-D, one share for each
    other rank, in their order), and adds what arrives to ``own``.

    Collective over ``group`` to construct, then over ``replicate`` by :meth:`advance`; every rank must do both, in the
    same order.
    """

    def __init__(
        self,
        own: Tensor,
        others: Tensor,
        counts: Sequence[int],
        group: AxisGroup,
        *,
        replicate: AxisGroup,
        side: SideStream,
    ) -> None:
        self._own, self._rank, self._replicate, self._side = own, group.rank, replicate, side
        # Sums are rounded to this dtype for the sum over the replicas; float16 might overflow.
        self._wire_dtype = torch.float32 if own.dtype == torch.float16 else own.dtype
        self._buffers: tuple[Tensor, Tensor] | None = None  # What is sent, and a row from each other rank.
        self._work: dist.Work | None = None
        self._is_added_up = False
        self._event: torch.Event | None = None
        if group.group is not None:
            sent, received = list(counts), [own.numel()] * group.size
            sent[group.rank] = received[group.rank] = 0
            receive = own.new_empty(group.size - 1, own.numel())
            self._buffers = others, receive
            (self._work,) = start_all_to_all(others, sent, receive.view(-1), received, group)

    def advance(self, *, wait: bool = False) -> bool:
        """Add up what has arrived (with ``wait``, wait for it) and start what follows; return whether all is started.

        Collective over ``replicate``; every rank must bring each sum to ``True``, in the same order.
        """
        if not self._is_added_up:
            must_wait = wait and self._replicate.group is not None
            if self._work is None or self._side.is_asynchronous or must_wait or self._work.is_completed():
                self._add_up()
        return self._is_added_up

    def result(self) -> Tensor:
        """The sum, 1-D, in the dtype of the parts or a wider one. Waits, on CUDA the current stream; call it once."""
        if not self._is_added_up:
            self._add_up()
        if self._work is not None:
            self._work.wait()
        if self._event is not None:
            stream = torch.cuda.current_stream(self._own.device)
            stream.wait_event(self._event)
            self._own.record_stream(stream)
        return self._own

    def _add_up(self) -> None:
        """Add what has arrived, and start the sum over the replicas, if there are any."""
        buffers, self._buffers = self._buffers, None
        with self._side.use(self._own, *(buffers or ())):
            if self._work is not None:
                self._work.wait()
                self._work = None
            if buffers is not None and self._own.numel():
                self._own = _sum_in_order(self._own, list(buffers[1]), self._rank)
            if self._replicate.group is not None:
                self._own = self._own.to(self._wire_dtype)
                self._work = start_all_reduce_sum(self._own, self._replicate)
            self._is_added_up = True
        self._event = self._side.record()


def _sum_in_order(own: Tensor, others: Sequence[Tensor], rank: int) -> Tensor:
    """Sum the shares of all ranks in rank order, 16-bit floats in float32; ``own`` may be overwritten."""
    if own.dtype.itemsize < 4:
        own, others = own.float(), [other.float() for other in others]
    before, after = others[:rank], others[rank:]
    if before:
        first, *rest = before
        for other in rest:
            first += other
        own += first
    for other in after:
        own += other
    return own
