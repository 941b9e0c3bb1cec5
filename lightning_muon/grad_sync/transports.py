"""How a bucket of gradients is summed over the ranks: an all-reduce (DDP), or a reduce-scatter to owners (ZeRO-2)."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_muon.comm.collectives import start_all_reduce_sum
from lightning_muon.comm.groups import ALONE, AxisGroup, own_group
from lightning_muon.comm.reduce_scatter import PendingSum, SideStream, flat_gradient
from lightning_muon.compat.torch import version
from lightning_muon.grad_sync.shard_map import BucketParts, ShardMap


class Results:
    """Tracks which ``p.grad`` are reduced gradients, to which backward adds in place. Local."""

    def __init__(self) -> None:
        # Weak, so that zero_grad frees the memory.
        self._kept: dict[Tensor, tuple[weakref.ref[Tensor], int]] = {}

    def keep(self, parameter: Tensor) -> None:
        """Note that ``parameter.grad``, as it is, is a result."""
        assert parameter.grad is not None
        self._kept[parameter] = weakref.ref(parameter.grad), version(parameter.grad)

    def holds(self, parameter: Tensor) -> bool:
        """Whether ``parameter.grad`` is a result, to which backward may have added."""
        kept = self._kept.get(parameter)
        return kept is not None and parameter.grad is not None and kept[0]() is parameter.grad

    def is_untouched(self, parameter: Tensor) -> bool:
        """Whether ``parameter.grad`` is a result, with nothing added or changed since."""
        gradient = parameter.grad
        return gradient is not None and self.holds(parameter) and self._kept[parameter][1] == version(gradient)


class AllReduce:
    """One all-reduce for each bucket; ``p.grad`` become views of it. Collective over ``group`` to construct."""

    kind = "all_reduce"
    present = frozenset[Tensor]()  # Gradients are kept in `p.grad` only.

    def __init__(self, group: AxisGroup) -> None:
        self.results = Results()  # Sums that are in `p.grad`.
        self._group = own_group(group)

    def start(self, gradients: Mapping[Tensor, Tensor | None]) -> _AllReduced:
        """Begin the sum of gradients of one dtype and device; ``None`` counts as zeros. Keeps no reference to them.

        Collective over the group in the same order.
        """
        buffer = torch.cat([flat_gradient(p, gradient) for p, gradient in gradients.items()])
        work = None if self._group.group is None else start_all_reduce_sum(buffer, self._group)
        return _AllReduced(self.results, tuple(gradients), buffer, work)

    def forget(self, parameters: Collection[Tensor]) -> None:
        """Do nothing: the sums are in ``p.grad``."""


@dataclass(frozen=True, eq=False)
class _AllReduced:
    """A buffer that is being summed."""

    results: Results
    parameters: tuple[Tensor, ...]
    buffer: Tensor
    work: dist.Work | None

    def advance(self, *, wait: bool = False) -> bool:
        """Return ``True``: nothing follows the all-reduce."""
        del wait
        return True

    def finish(self, divisor: float, present: Collection[Tensor]) -> None:
        """Set ``p.grad`` of the parameters in ``present``, or add to what an earlier launch has set."""
        if self.work is not None:
            self.work.wait()
        if divisor != 1:
            self.buffer.div_(divisor)
        parts = self.buffer.split([parameter.numel() for parameter in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            if parameter in present:
                reduced = part.view(parameter.shape)
                parameter.grad = reduced if parameter.grad is None else parameter.grad.add_(reduced)
                self.results.keep(parameter)


class ReduceScatterToOwners:
    """One uneven exchange for each bucket, then an all-reduce over replicas; ``p.grad`` is ``None`` once it is sent.

    Shares are added in the order of the ranks. Collective over the axes of the mesh to construct; every rank must do
    so.
    """

    kind = "reduce_scatter"

    def __init__(self, shard_map: ShardMap) -> None:
        self.results = Results()  # Stays empty: `p.grad` is never a sum.
        self.shard, self._replicate = own_group(shard_map.shard), own_group(shard_map.replicate or ALONE)
        self._parts = lru_cache(1 << 12)(partial(BucketParts, shard_map=shard_map))
        self._side = cache(SideStream)
        # Parameters for which any rank has computed a gradient since the last `forget`; the same on all ranks.
        self.present: set[Tensor] = set()
        self.unread: dict[Tensor, list[_Scattered]] = {}
        self._reduced: dict[Tensor, Tensor] = {}

    def start(self, gradients: Mapping[Tensor, Tensor | None]) -> _Scattered:
        """See :meth:`AllReduce.start`. Collective over the axes of the mesh in this order."""
        parameters = tuple(gradients)
        parts = self._parts(parameters)
        pieces = parts.cut([flat_gradient(p, gradient) for p, gradient in gradients.items()])
        to, rank = parts.of_rank, self.shard.rank
        others = [pieces[index] for other, indices in enumerate(to) for index in indices if other != rank]
        empty = pieces[0].new_empty(0)
        pending = PendingSum(
            torch.cat([pieces[index] for index in to[rank]] or [empty]),
            torch.cat(others or [empty]),
            [sum(parts.sizes[index] for index in indices) for indices in to],
            self.shard,
            replicate=self._replicate,
            side=self._side(empty.device),
        )
        return _Scattered(self, parameters, parts, pending)

    def reduced(self, parameter: Tensor) -> Tensor | None:
        """The calling rank's part of the sum since :meth:`forget`, if any rank has a gradient; waits. Local."""
        for scattered in self.unread.pop(parameter, ()):
            scattered.add_to(self._reduced)
        return self._reduced.get(parameter)

    def forget(self, parameters: Collection[Tensor]) -> None:
        """Drop the sums, as ``zero_grad`` does with ``p.grad``; local, to be called alike on all ranks."""
        self.present.difference_update(parameters)
        for parameter in parameters:
            self.reduced(parameter)
            self._reduced.pop(parameter, None)


@dataclass(eq=False)
class _Scattered:
    """A bucket that is being summed; once the divisor is known, ``transport.unread`` has it under each parameter."""

    transport: ReduceScatterToOwners
    parameters: tuple[Tensor, ...]
    parts: BucketParts
    sum: PendingSum | None
    divisor: float = 1.0
    present: Collection[Tensor] = ()

    def advance(self, *, wait: bool = False) -> bool:
        """Add up and start the sum over the replicas; collective over the replicas, in the same order on all."""
        assert self.sum is not None
        return self.sum.advance(wait=wait)

    def finish(self, divisor: float, present: Collection[Tensor]) -> None:
        """Set the divisor; :meth:`ReduceScatterToOwners.reduced` does the rest."""
        self.divisor, self.present = divisor, present
        self.transport.present.update(present)
        for parameter in self.parameters:
            self.transport.unread.setdefault(parameter, []).append(self)

    @torch.no_grad()
    def add_to(self, sums: dict[Tensor, Tensor]) -> None:
        """Wait, and add the calling rank's parts to ``sums``, only once; on CUDA the current stream waits."""
        if self.sum is None:
            return
        buffer, self.sum = self.sum.result(), None
        if self.divisor != 1:
            buffer.div_(self.divisor)
        pieces = buffer.to(self.parameters[0].dtype).split([box.numel for box in self.parts.own])
        for parameter, piece, box in zip(self.parameters, pieces, self.parts.own, strict=True):
            if parameter in self.present:
                part = piece.view(box.shape)
                earlier = sums.get(parameter)
                sums[parameter] = part if earlier is None else earlier + part


# How gradients are summed over the ranks, and a bucket of them that is being summed.
Transport = AllReduce | ReduceScatterToOwners
Pending = _AllReduced | _Scattered
