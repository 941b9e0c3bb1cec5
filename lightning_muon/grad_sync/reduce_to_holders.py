"""Gradients of replicated parameters summed only where they are used: each part on the ranks that hold it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_muon.comm.mesh import ALONE, PrivateGroups
from lightning_muon.comm.nodes import Hop, make_hops
from lightning_muon.comm.reduce import Leg, PendingSum, SideStream, flat_gradient, start_reduce_scatter
from lightning_muon.grad_sync.holdings import BucketParts, Holdings


class ReduceToHolders:
    """One uneven exchange for each bucket, then an all-reduce among replicas; ``p.grad`` is gone as soon as it is sent.

    The shares of all ranks are added in their order; with ``grid`` those of each node, and then these sums in the order
    of the nodes. 16-bit floats are added in float32, and what travels on, between nodes or replicas, is rounded to the
    dtype of the parameter (float16, which it might overflow, is not).

    Collective over the axes of the mesh to construct; every rank must do so.

    Args:
        holdings: Says which part of each parameter each rank holds.
        grid: For each node its ranks of the shard axis, if a node shall add up before it sends; see
            :func:`~lightning_muon.comm.nodes.make_hops`.
    """

    def __init__(self, holdings: Holdings, grid: Sequence[Sequence[int]] = ()) -> None:
        self._holdings = holdings
        self._hops = make_hops(holdings.shard, grid)
        (self._replicate,) = PrivateGroups().of([holdings.replicate or ALONE])
        self._packings: dict[Tensor, _Packing] = {}  # By the first parameter.
        self._sides: dict[torch.device, SideStream] = {}
        self._unread: dict[Tensor, list[_Parts]] = {}
        self._reduced: dict[Tensor, Tensor] = {}

    def start(self, gradients: Mapping[Tensor, Tensor | None]) -> _Parts:
        """As in :class:`~lightning_muon.grad_sync.transport.Transport`.

        Collective over the private groups; every rank must call it.
        """
        parameters = tuple(gradients)
        packing = self._packings.get(parameters[0])
        if packing is None or not packing.parts.are_of(parameters):
            packing = self._packings[parameters[0]] = _Packing(parameters, self._holdings, self._hops)
        own, others = packing.pack([flat_gradient(p, gradient) for p, gradient in gradients.items()])
        if own.device not in self._sides:
            self._sides[own.device] = SideStream(own.device)
        pending = start_reduce_scatter(
            own, others, packing.legs, replicate=self._replicate, side=self._sides[own.device]
        )
        return _Parts(self, parameters, packing, pending)

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
        pieces = buffer.split(parts.packing.sizes)
        for parameter, piece, shape in zip(parts.parameters, pieces, parts.packing.shapes, strict=True):
            if parameter in parts.present:
                part = piece.view(shape)
                earlier = self._reduced.get(parameter)
                self._reduced[parameter] = part if earlier is None else earlier + part


class _Packing:
    """How a bucket is sent; the same in every step.

    Attributes:
        parts: How its parameters are divided.
        legs: Of its sum.
        shapes: Of the calling rank's part of each parameter.
        sizes: Their elements.
    """

    def __init__(self, parameters: Sequence[Tensor], holdings: Holdings, hops: Sequence[Hop]) -> None:
        self.parts = BucketParts(parameters, holdings)
        counts, of_rank, first = self.parts.counts, self.parts.of_rank, hops[0]
        self.legs = [Leg(hop.group, [sum(counts[rank] for rank in ranks) for ranks in hop.parts]) for hop in hops]
        pieces = [[piece for rank in ranks for piece in of_rank[rank]] for ranks in first.parts]
        self._own = pieces.pop(first.group.rank)
        self._others = [piece for each in pieces for piece in each]
        self.shapes = [holdings.local_shape(parameter) for parameter in parameters]
        start_and_stop = [holdings.ranges(parameter)[holdings.shard.rank] for parameter in parameters]
        self.sizes = [stop - start for start, stop in start_and_stop]

    def pack(self, flattened: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """What the calling rank adds up first, and what it sends to the other ranks of the first leg; copies."""
        pieces = self.parts.cut(flattened)
        own, others = ([pieces[index] for index in indices] for indices in (self._own, self._others))
        empty = flattened[0].new_empty(0)
        return torch.cat(own or [empty]), torch.cat(others or [empty])


@dataclass(eq=False)
class _Parts:
    """One bucket on its way; see :class:`~lightning_muon.grad_sync.transport.Pending`."""

    transport: ReduceToHolders
    parameters: tuple[Tensor, ...]
    packing: _Packing
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
