"""How the matrices of one chunk reach their owners and how the updates come back.

An owner takes the pieces of its matrices from the ranks of its own replica and sends the updates to every rank that it
serves. A rank's own piece never travels, and what several ranks get is packed once. All tensors of a chunk are in the
wire dtype, so that a matrix gives the same update whoever owns it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_muon.comm.exchange import BufferPool, Parts, parts, start_all_to_all, start_messages
from lightning_muon.comm.mesh import AxisGroup
from lightning_muon.optim.binding import ExchangeGroup, MatrixJob
from lightning_muon.params.logical import Box
from lightning_muon.schedule.muon import server_of

# A message: the jobs (positions in the chunk) whose pieces it holds, and the boxes of these pieces.
_Message = tuple[tuple[int, Box], ...]
_SENT, _RECEIVED = "sent", "received"


class Leg:
    """One direction: who sends which pieces to whom, and where they lie in the packed buffers.

    Args:
        name: For the names of buffers.
        outgoing: Message for each other rank.
        incoming: Message from each other rank.
        num_ranks: Size of the exchange group.
        is_all_to_all: Whether the messages of every rank of the group differ, so that one uneven all-to-all does.
    """

    def __init__(
        self,
        name: str,
        outgoing: Mapping[int, _Message],
        incoming: Mapping[int, _Message],
        *,
        num_ranks: int,
        is_all_to_all: bool,
    ) -> None:
        self.name = name
        self._is_all_to_all = is_all_to_all
        # Ranks with equal messages share one region of the send buffer.
        first_with: dict[_Message, int] = {}
        self._region_of = {rank: first_with.setdefault(message, rank) for rank, message in outgoing.items() if message}
        regions = sorted((rank, message) for message, rank in first_with.items() if message)
        self.sent = [piece for _, message in regions for piece in message]
        self.received = [piece for _, message in sorted(incoming.items()) for piece in message]
        self.send_layout = _layout(regions, num_ranks)
        self.receive_layout = _layout(sorted(incoming.items()), num_ranks)

    def start(self, send: Tensor, receive: Tensor, axes: AxisGroup) -> Sequence[dist.Work]:
        """Begin the communication. Collective over ``axes``; every rank of them must call it."""
        if self._is_all_to_all:
            return start_all_to_all(send, self.send_layout, receive, self.receive_layout, axes)
        regions = send[: self.send_layout.numel].split(list(self.send_layout.splits))
        sources = receive[: self.receive_layout.numel].split(list(self.receive_layout.splits))
        return start_messages(
            {rank: regions[region] for rank, region in self._region_of.items()},
            {rank: source for rank, source in enumerate(sources) if source.numel()},
            axes,
        )


class Transfer:
    """One chunk on its way. The methods are called in this order: pack, start_gather, unpack, and so on back.

    Args:
        group: The exchange group of the chunk.
        taken: The jobs of the chunk that take part, equal on all ranks.
        pool: Memory.
        slots: Names of the buffers to use for the way there and for the way back.
    """

    def __init__(self, group: ExchangeGroup, taken: Sequence[int], pool: BufferPool, slots: tuple[str, str]) -> None:
        self.group, self.taken, self.slots = group, tuple(taken), slots
        self.jobs = [group.jobs[index] for index in taken]
        self._owners = [group.plan.owners[index] for index in taken]
        self._pool = pool
        self._owned = [index for index, owners in enumerate(self._owners) if self._me in owners]
        self.owned = [self.jobs[index] for index in self._owned]
        self._index_of = {job: index for index, job in enumerate(self.jobs)}
        self._own_pieces: dict[int, Tensor] = {}
        self._cached_views: dict[str, tuple[Tensor, list[Tensor]]] = {}
        self._cached_send_views: tuple[list[Tensor], dict[int, list[Tensor]]] | None = None

    def take_gather_buffers(self) -> None:
        """Take the memory for the way to the owners now: on CUDA it belongs to the stream that is current then."""
        for direction in (_SENT, _RECEIVED):
            self._buffer(self._gather, direction)

    def pack(self, jobs: Sequence[MatrixJob], pieces: Sequence[Tensor]) -> None:
        """Take the calling rank's piece of some of the jobs; those for other owners are copied."""
        views = self._send_views()
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for job, piece in zip(jobs, pieces, strict=True):
            index = self._index_of[job]
            targets += views.get(index, ())
            sources += [piece] * len(views.get(index, ()))
            if index in self._owned:
                self._own_pieces[index] = piece
        _copy(targets, sources)

    def is_packed(self, jobs: Sequence[MatrixJob], pieces: Sequence[Tensor]) -> list[Tensor]:
        """Whether the pieces of some of the jobs have the bits of those that were packed: bools on the device."""
        views = self._send_views()
        return [
            (packed == piece.to(packed.dtype)).all()
            for job, piece in zip(jobs, pieces, strict=True)
            for packed in (*views.get(self._index_of[job], ()), *self._own_piece(job))
        ]

    def _own_piece(self, job: MatrixJob) -> list[Tensor]:
        piece = self._own_pieces.get(self._index_of[job])
        return [] if piece is None else [piece]

    def _send_views(self) -> dict[int, list[Tensor]]:
        """Where the pieces of each job go; a piece for several owners is there once for each."""
        views = self._views(self._gather, _SENT)
        if self._cached_send_views is None or self._cached_send_views[0] is not views:
            by_index: dict[int, list[Tensor]] = {}
            for (index, _), view in zip(self._gather.sent, views, strict=True):
                by_index.setdefault(index, []).append(view)
            self._cached_send_views = views, by_index
        return self._cached_send_views[1]

    def start_gather(self) -> Sequence[dist.Work]:
        """Send the pieces to the owners. Collective over the exchange group; every rank of it must call it."""
        return self._gather.start(
            self._buffer(self._gather, _SENT), self._buffer(self._gather, _RECEIVED), self.group.axes
        )

    def unpack(self, matrices: Sequence[Tensor]) -> None:
        """Fill the whole matrices (box shape) that this rank owns, in the order of ``owned``."""
        whole = dict(zip(self._owned, matrices, strict=True))
        targets = [self._part(whole[index], index, box) for index, box in self._gather.received]
        sources = list(self._views(self._gather, _RECEIVED))
        for index, piece in self._own_pieces.items():
            targets.append(self._part(whole[index], index, self.jobs[index].pieces[self._me]))
            sources.append(piece)
        _copy(targets, sources)
        self._own_pieces = {}

    def pack_updates(self, updates: Sequence[Tensor]) -> None:
        """Take the update of every owned matrix."""
        whole = dict(zip(self._owned, updates, strict=True))
        sources = [self._part(whole[index], index, box) for index, box in self._scatter.sent]
        _copy(self._views(self._scatter, _SENT), sources)
        self._own_pieces = {
            index: self._part(update, index, self.jobs[index].pieces[self._me]).to(self._pool.dtype)
            for index, update in whole.items()
        }

    def start_scatter(self) -> Sequence[dist.Work]:
        """Send the updates back. Collective over the exchange group; every rank of it must call it."""
        return self._scatter.start(
            self._buffer(self._scatter, _SENT), self._buffer(self._scatter, _RECEIVED), self.group.axes
        )

    def updates(self) -> list[Tensor]:
        """The calling rank's piece of the update of every job; views of the buffers, valid until the slot is reused."""
        received = zip(
            (index for index, _ in self._scatter.received), self._views(self._scatter, _RECEIVED), strict=True
        )
        found = dict(received) | self._own_pieces
        self._own_pieces = {}
        empty = self._buffer(self._scatter, _RECEIVED)[:0]
        return [
            found[index] if index in found else empty.view(job.pieces[self._me].shape)
            for index, job in enumerate(self.jobs)
        ]

    @property
    def _me(self) -> int:
        return self.group.axes.rank

    @cached_property
    def _gather(self) -> Leg:
        replica_of, me = self.group.replica_of, self._me
        peers = [rank for rank in range(len(replica_of)) if rank != me and replica_of[rank] == replica_of[me]]
        return Leg(
            "gather",
            {rank: self._pieces(me, lambda owners, rank=rank: rank in owners) for rank in peers},
            {rank: self._pieces(rank, lambda owners: me in owners) for rank in peers},
            num_ranks=len(replica_of),
            is_all_to_all=all(len(owners) == 1 for owners in self.group.plan.owners),
        )

    @cached_property
    def _scatter(self) -> Leg:
        replica_of, me = self.group.replica_of, self._me
        peers = [rank for rank in range(len(replica_of)) if rank != me]
        return Leg(
            "scatter",
            {
                rank: self._pieces(rank, lambda owners, rank=rank: server_of(owners, rank, replica_of) == me)
                for rank in peers
            },
            {
                rank: self._pieces(me, lambda owners, rank=rank: server_of(owners, me, replica_of) == rank)
                for rank in peers
            },
            num_ranks=len(replica_of),
            is_all_to_all=len(set(replica_of)) == 1,
        )

    def _pieces(self, rank: int, is_wanted: Callable[[tuple[int, ...]], bool]) -> _Message:
        """The pieces that ``rank`` holds of the jobs with such owners."""
        return tuple(
            (index, job.pieces[rank])
            for index, (job, owners) in enumerate(zip(self.jobs, self._owners, strict=True))
            if job.pieces[rank].numel and is_wanted(owners)
        )

    def _buffer(self, leg: Leg, direction: str) -> Tensor:
        slot = self.slots[leg.name == "scatter"]
        layout = leg.send_layout if direction == _SENT else leg.receive_layout
        return self._pool.take(f"{leg.name}-{direction}-{slot}", layout.numel)

    def _views(self, leg: Leg, direction: str) -> list[Tensor]:
        """The parts of a buffer; kept, because making hundreds of views takes as long as filling them."""
        buffer = self._buffer(leg, direction)
        key = f"{leg.name}-{direction}"
        cached = self._cached_views.get(key)
        if cached is None or cached[0] is not buffer:
            layout = leg.send_layout if direction == _SENT else leg.receive_layout
            cached = self._cached_views[key] = (buffer, layout.views(buffer))
        return cached[1]

    def _part(self, whole: Tensor, index: int, box: Box) -> Tensor:
        return whole[box.slices_in(self.jobs[index].matrix.box)]


def _layout(messages: Iterable[tuple[int, _Message]], num_ranks: int) -> Parts:
    pieces = [(rank, box.shape) for rank, message in messages for _, box in message]
    return parts([rank for rank, _ in pieces], [shape for _, shape in pieces], num_ranks)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))  # type: ignore[arg-type]
