"""How the matrices of one chunk reach their owners and how the updates come back.

Three ways, one interface: sharded (all-to-all there and back), replicated (only back, by broadcast), resident (no
traffic). All tensors of a chunk are in the wire dtype, so that a matrix gives the same update whoever owns it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_muon.comm.exchange import BufferPool, Parts, parts, start_all_to_all, start_broadcasts
from lightning_muon.comm.mesh import AxisGroup
from lightning_muon.optim.binding import ExchangeGroup, MatrixJob


class Transfer(ABC):
    """One chunk on its way; the methods are called once each, in this order, by all ranks of the exchange group."""

    jobs: Sequence[MatrixJob]
    owned: Sequence[MatrixJob]
    axes: AxisGroup

    @abstractmethod
    def start_gather(self, pieces: Sequence[Tensor]) -> None:
        """Send the local piece of every job to its owner."""

    @abstractmethod
    def matrices(self) -> list[Tensor]:
        """Wait; the whole matrices (box shape) that this rank owns, in job order."""

    @abstractmethod
    def start_scatter(self, updates: Sequence[Tensor]) -> None:
        """Send the update of every owned matrix back to the ranks that hold it."""

    @abstractmethod
    def updates(self) -> list[Tensor]:
        """Wait; the local piece of the update of every job."""


def make_transfer(
    group: ExchangeGroup, taken: Sequence[int], pool: BufferPool, slot: int, *, is_resident: bool
) -> Transfer:
    """The way that fits: ``taken`` are the active jobs of one chunk, ``slot`` the rolling buffers to use (0 or 1)."""
    jobs = [group.jobs[index] for index in taken]
    owners = [group.plan.owners[index] for index in taken]
    if is_resident:
        return ResidentTransfer(jobs, owners, group.axes, pool.dtype)
    if group.is_replicated:
        return ReplicatedTransfer(jobs, owners, group.axes, pool, slot)
    return ShardedTransfer(jobs, owners, group.axes, pool, slot)


class ResidentTransfer(Transfer):
    """Matrices that lie whole on their owner and nowhere else."""

    def __init__(self, jobs: Sequence[MatrixJob], owners: Sequence[int], axes: AxisGroup, dtype: torch.dtype) -> None:
        self.jobs, self.axes = jobs, axes
        self._dtype = dtype
        self._is_mine = [owner == axes.rank for owner in owners]
        self.owned = [job for job, mine in zip(jobs, self._is_mine, strict=True) if mine]

    @override
    def start_gather(self, pieces: Sequence[Tensor]) -> None:
        self._pieces = list(pieces)

    @override
    def matrices(self) -> list[Tensor]:
        mine = [piece.to(self._dtype) for piece, mine in zip(self._pieces, self._is_mine, strict=True) if mine]
        # What is left is empty: these matrices lie on other ranks.
        self._pieces = [piece[:0] if mine else piece for piece, mine in zip(self._pieces, self._is_mine, strict=True)]
        return mine

    @override
    def start_scatter(self, updates: Sequence[Tensor]) -> None:
        results = iter(updates)
        self._updates = [
            next(results).to(self._dtype) if mine else piece
            for piece, mine in zip(self._pieces, self._is_mine, strict=True)
        ]

    @override
    def updates(self) -> list[Tensor]:
        return self._updates


class ReplicatedTransfer(Transfer):
    """Matrices that every rank holds: the owner has all it needs, and tells the update to all."""

    def __init__(
        self, jobs: Sequence[MatrixJob], owners: Sequence[int], axes: AxisGroup, pool: BufferPool, slot: int
    ) -> None:
        self.jobs, self.axes = jobs, axes
        self._owners = owners
        self.owned = [job for job, owner in zip(jobs, owners, strict=True) if owner == axes.rank]
        order = sorted(range(len(jobs)), key=owners.__getitem__)
        layout = parts([owners[i] for i in order], [jobs[i].matrix.box.shape for i in order], axes.size)
        buffer = pool.take(f"replicated-{slot}", layout.numel)
        views = dict(zip(order, layout.views(buffer), strict=True))
        self._views = [views[index] for index in range(len(jobs))]
        self._buffers = buffer[: layout.numel].split(list(layout.splits))

    @override
    def start_gather(self, pieces: Sequence[Tensor]) -> None:
        self._mine = [piece for piece, owner in zip(pieces, self._owners, strict=True) if owner == self.axes.rank]

    @override
    def matrices(self) -> list[Tensor]:
        dtype = self._buffers[0].dtype
        return [piece.to(dtype) for piece in self._mine]

    @override
    def start_scatter(self, updates: Sequence[Tensor]) -> None:
        mine = [view for view, owner in zip(self._views, self._owners, strict=True) if owner == self.axes.rank]
        _copy(mine, updates)
        self._works = start_broadcasts(self._buffers, self.axes)

    @override
    def updates(self) -> list[Tensor]:
        for work in self._works:
            work.wait()
        return self._views


class ShardedTransfer(Transfer):
    """Matrices in pieces on several ranks: packed uneven all-to-all to the owners, and back the same way."""

    def __init__(
        self, jobs: Sequence[MatrixJob], owners: Sequence[int], axes: AxisGroup, pool: BufferPool, slot: int
    ) -> None:
        self.jobs, self.axes = jobs, axes
        self._owners, self._pool, self._slot = owners, pool, slot
        me = axes.rank
        self._owned = [index for index, owner in enumerate(owners) if owner == me]
        self.owned = [jobs[index] for index in self._owned]
        # Pieces that this rank sends to other owners, and pieces of its own matrices that other ranks send to it. A
        # rank's piece of its own matrix stays where it is.
        self._outgoing = sorted(
            (index for index, job in enumerate(jobs) if owners[index] != me and job.pieces[me].numel),
            key=owners.__getitem__,
        )
        self._incoming = [
            (rank, index)
            for rank in range(axes.size)
            if rank != me
            for index in self._owned
            if jobs[index].pieces[rank].numel
        ]
        self._held = parts(
            [owners[i] for i in self._outgoing], [jobs[i].pieces[me].shape for i in self._outgoing], axes.size
        )
        self._whole = parts(
            [rank for rank, _ in self._incoming], [jobs[i].pieces[rank].shape for rank, i in self._incoming], axes.size
        )

    @override
    def start_gather(self, pieces: Sequence[Tensor]) -> None:
        send = self._buffer("gather-held", self._held)
        self._received = self._buffer("gather-whole", self._whole)
        _copy(self._held.views(send), [pieces[index] for index in self._outgoing])
        self._own_pieces = {index: pieces[index] for index in self._owned}
        self._work = start_all_to_all(send, self._held, self._received, self._whole, self.axes)

    @override
    def matrices(self) -> list[Tensor]:
        _wait(self._work)
        matrices = {index: self._received.new_empty(self.jobs[index].matrix.box.shape) for index in self._owned}
        targets = [self._piece_of(matrices[index], index, rank) for rank, index in self._incoming]
        sources = self._whole.views(self._received)
        for index, piece in self._own_pieces.items():
            targets.append(self._piece_of(matrices[index], index, self.axes.rank))
            sources.append(piece)
        _copy(targets, sources)
        return list(matrices.values())

    @override
    def start_scatter(self, updates: Sequence[Tensor]) -> None:
        send = self._buffer("scatter-whole", self._whole)
        self._returned = self._buffer("scatter-held", self._held)
        by_index = dict(zip(self._owned, updates, strict=True))
        sources = [self._piece_of(by_index[index], index, rank) for rank, index in self._incoming]
        _copy(self._whole.views(send), sources)
        self._own_updates = {
            index: self._piece_of(update, index, self.axes.rank).to(send.dtype) for index, update in by_index.items()
        }
        self._work = start_all_to_all(send, self._whole, self._returned, self._held, self.axes)

    @override
    def updates(self) -> list[Tensor]:
        _wait(self._work)
        found = dict(zip(self._outgoing, self._held.views(self._returned), strict=True)) | self._own_updates
        empty = self._returned[:0]
        return [
            found[index] if index in found else empty.view(job.pieces[self.axes.rank].shape)
            for index, job in enumerate(self.jobs)
        ]

    def _buffer(self, name: str, layout: Parts) -> Tensor:
        return self._pool.take(f"{name}-{self._slot}", layout.numel)

    def _piece_of(self, whole: Tensor, index: int, rank: int) -> Tensor:
        job = self.jobs[index]
        return whole[job.pieces[rank].slices_in(job.matrix.box)]


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))  # type: ignore[arg-type]


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
