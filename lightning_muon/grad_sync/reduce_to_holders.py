"""Gradients of replicated parameters summed only where they are used: each part on the ranks that hold it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_muon.comm.mesh import ALONE, PrivateGroups
from lightning_muon.comm.reduce import PendingSum, SideStream, flat_parts, start_reduce_scatter
from lightning_muon.grad_sync.holdings import Holdings


class ReduceToHolders:
    """One uneven exchange for each bucket, then an all-reduce among replicas; ``p.grad`` is gone as soon as it is sent.

    Collective over the axes of the mesh to construct; every rank must do so.

    Args:
        holdings: Says which part of each parameter each rank holds.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._shard, self._replicate = PrivateGroups().of([holdings.shard, holdings.replicate or ALONE])
        self._sides: dict[torch.device, SideStream] = {}
        self._unread: dict[Tensor, list[_Parts]] = {}
        self._reduced: dict[Tensor, Tensor] = {}

    def start(self, gradients: Mapping[Tensor, Tensor | None]) -> _Parts:
        """As in :class:`~lightning_muon.grad_sync.transport.Transport`.

        Collective over the private groups; every rank must call it.
        """
        parts = [flat_parts(p, gradient, self._holdings.ranges(p)) for p, gradient in gradients.items()]
        ranks, me = range(self._shard.size), self._shard.rank
        own = torch.cat([part[me] for part in parts])
        pieces = (part[rank] for rank in ranks if rank != me for part in parts)
        others = torch.cat([own[:0], *(piece for piece in pieces if piece.numel())])
        counts = [sum(part[rank].numel() for part in parts) for rank in ranks]
        side = self._sides.setdefault(own.device, SideStream(own.device))
        pending = start_reduce_scatter(own, others, counts, group=self._shard, replicate=self._replicate, side=side)
        return _Parts(self, tuple(gradients), pending)

    def reduced(self, parameter: Tensor) -> Tensor | None:
        """The part of the gradient that the calling rank holds, in the dtype of the parameter; waits for its bucket.

        The sum of all passes since :meth:`forget`. Shaped like the rank's part of ``parameter``; ``None`` if no rank
        has computed a gradient. Local; on CUDA the current stream waits.
        """
        for parts in self._unread.get(parameter, ()):
            self._read(parts)
        self._unread.pop(parameter, None)
        return self._reduced.get(parameter)

    def resends(self, parameter: Tensor) -> bool:
        """As in ``Transport``: sums are kept apart from ``p.grad``."""
        return False

    def is_untouched(self, parameter: Tensor) -> bool:
        """As in ``Transport``: ``p.grad`` is never a sum."""
        return False

    def forget(self, parameters: Collection[Tensor]) -> None:
        """Drop the sums of these parameters; local."""
        for parameter in parameters:
            self.reduced(parameter)
            self._reduced.pop(parameter, None)

    def finished(self, parts: _Parts) -> None:
        """The divisor of ``parts`` is known, so they may be read."""
        for parameter in parts.parameters:
            self._unread.setdefault(parameter, []).append(parts)

    @torch.no_grad()
    def _read(self, parts: _Parts) -> None:
        """Add a bucket to the sums, once."""
        if parts.sum is None:
            return
        buffer, parts.sum = parts.sum.result(), None
        if parts.divisor != 1:
            buffer.div_(parts.divisor)
        buffer = buffer.to(parts.parameters[0].dtype)
        shapes = [self._holdings.local_shape(parameter) for parameter in parts.parameters]
        pieces = buffer.split([math.prod(shape) for shape in shapes])
        for parameter, piece, shape in zip(parts.parameters, pieces, shapes, strict=True):
            if parameter in parts.present:
                part = piece.view(shape)
                earlier = self._reduced.get(parameter)
                self._reduced[parameter] = part if earlier is None else earlier + part


@dataclass(eq=False)
class _Parts:
    """One bucket on its way; see :class:`~lightning_muon.grad_sync.transport.Pending`."""

    transport: ReduceToHolders
    parameters: tuple[Tensor, ...]
    sum: PendingSum | None
    divisor: float = 1.0
    present: Collection[Tensor] = ()

    def advance(self, *, wait: bool = False) -> bool:
        """Add up and start the sum over the replicas; collective over the replicas, in the same order on all."""
        assert self.sum is not None
        return self.sum.advance(wait=wait)

    def finish(self, divisor: float, present: Collection[Tensor]) -> None:
        """Leave the rest to :meth:`ReduceToHolders.reduced`."""
        self.divisor, self.present = divisor, present
        self.transport.finished(self)
