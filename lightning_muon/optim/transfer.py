"""How the matrices of one bucket reach their owners and how the updates come back.

An owner takes the pieces of its matrices from the ranks of its own replica and sends the updates to every rank that it
serves. A rank's own piece never travels, and what several ranks get is packed once. All tensors of a bucket are in the
wire dtype, so that a matrix gives the same update whoever owns it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial

import torch.distributed as dist
from torch import Tensor

from lightning_muon.comm.collectives import BufferPool, Parts, parts, start_all_to_all, start_messages
from lightning_muon.comm.groups import AxisGroup
from lightning_muon.compat import foreach
from lightning_muon.optim.step_plan import ExchangeGroup, MatrixJob
from lightning_muon.params.logical import Box
from lightning_muon.schedule.traffic import server_of

# The jobs whose pieces a message holds, and the boxes of these pieces.
_Message = Sequence[tuple[MatrixJob, Box]]
_SENT, _RECEIVED = "sent", "received"


class Leg:
    """One direction: who sends which pieces to whom, and where they lie in the packed buffers.

    Args:
        name: For the names of buffers.
        outgoing: Message for each other rank that gets one.
        incoming: Message from each other rank that sends one.
        num_ranks: Size of the exchange group.
        is_all_to_all: Whether the messages of every rank of the group differ, so that one uneven all-to-all does.

    Attributes:
        start: Begins the communication from the buffer ``send`` to the buffer ``receive``; every rank of ``group`` must
            call it.
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
        # Ranks with equal messages share one region of the send buffer.
        first_with: dict[tuple[tuple[MatrixJob, Box], ...], int] = {}
        self._region_of = {rank: first_with.setdefault(tuple(outgoing[rank]), rank) for rank in sorted(outgoing)}
        regions = [(rank, outgoing[rank]) for rank in first_with.values()]
        self.sent = [piece for _, message in regions for piece in message]
        self.received = [piece for _, message in sorted(incoming.items()) for piece in message]
        self.send_layout = _layout(regions, num_ranks)
        self.receive_layout = _layout(sorted(incoming.items()), num_ranks)
        self.start: Callable[..., Sequence[dist.Work]] = self._start_messages
        if is_all_to_all:
            self.start = partial(start_all_to_all, to=self.send_layout, source=self.receive_layout)

    def _start_messages(self, send: Tensor, receive: Tensor, group: AxisGroup) -> Sequence[dist.Work]:
        """As ``start``, for legs on which several ranks get the same."""
        regions, sources = self.send_layout.by_peer(send), self.receive_layout.by_peer(receive)
        return start_messages(
            {rank: regions[region] for rank, region in self._region_of.items()},
            {rank: source for rank, source in enumerate(sources) if source.numel()},
            group,
        )


class BucketPieces:
    """What the calling rank has to do with the matrices of a bucket: which pieces it holds, sends and receives; local.

    Made of the plan alone, so that it serves every step and all buffers.

    Args:
        group: The exchange group of the bucket.
        taken: The jobs of the bucket that take part, equal on all ranks.

    Attributes:
        jobs: Those of which the calling rank holds a piece.
        owned: Those whose matrices it orthogonalizes.
    """

    def __init__(self, group: ExchangeGroup, taken: Sequence[int]) -> None:
        self.group, self.taken = group, tuple(taken)
        me, owners = group.axes.rank, group.plan.owners
        self._held = [index for index in taken if me in group.jobs[index].pieces.by_rank]
        self._owned = [index for index in taken if me in owners[index]]
        self.jobs = [group.jobs[index] for index in self._held]
        self.owned = [group.jobs[index] for index in self._owned]

    @cached_property
    def gather(self) -> Leg:
        """Pieces to the owners of the same replica."""
        replica_of, me, owners = self.group.replica_of, self.group.axes.rank, self.group.plan.owners
        outgoing: dict[int, list[tuple[MatrixJob, Box]]] = {}
        incoming: dict[int, list[tuple[MatrixJob, Box]]] = {}
        for index, job in zip(self._held, self.jobs, strict=True):
            for rank in owners[index]:
                if rank != me and replica_of[rank] == replica_of[me]:
                    outgoing.setdefault(rank, []).append((job, job.pieces.by_rank[me]))
        for job in self.owned:
            for rank, piece in job.pieces.by_rank.items():
                if rank != me and replica_of[rank] == replica_of[me]:
                    incoming.setdefault(rank, []).append((job, piece))
        is_all_to_all = self.group.has_single_owners
        return Leg("gather", outgoing, incoming, num_ranks=len(replica_of), is_all_to_all=is_all_to_all)

    @cached_property
    def scatter(self) -> Leg:
        """Updates to all ranks that hold pieces, each from one owner."""
        replica_of, me, owners = self.group.replica_of, self.group.axes.rank, self.group.plan.owners
        outgoing: dict[int, list[tuple[MatrixJob, Box]]] = {}
        incoming: dict[int, list[tuple[MatrixJob, Box]]] = {}
        for index, job in zip(self._owned, self.owned, strict=True):
            have_it = set(owners[index])
            for rank, piece in job.pieces.by_rank.items():
                if rank not in have_it and server_of(owners[index], rank, replica_of) == me:
                    outgoing.setdefault(rank, []).append((job, piece))
        for index, job in zip(self._held, self.jobs, strict=True):
            if me not in owners[index]:
                server = server_of(owners[index], me, replica_of)
                incoming.setdefault(server, []).append((job, job.pieces.by_rank[me]))
        is_all_to_all = not self.group.has_replicas
        return Leg("scatter", outgoing, incoming, num_ranks=len(replica_of), is_all_to_all=is_all_to_all)


class Transfer:
    """One bucket on its way. The methods are called in this order: pack, unpack, pack_updates, updates.

    Args:
        pieces: Of the bucket.
        pool: Memory.
        slots: Names of the buffers to use for the way there and for the way back.
    """

    def __init__(self, pieces: BucketPieces, pool: BufferPool, slots: tuple[str, str]) -> None:
        self.pieces, self.slots = pieces, slots
        self.jobs, self.owned = pieces.jobs, pieces.owned
        self.axes, self._pool = pieces.group.axes, pool
        self._owned = frozenset(pieces.owned)
        self._own_pieces: dict[MatrixJob, Tensor] = {}
        self._cached_views: dict[str, tuple[Tensor, list[Tensor]]] = {}
        self._cached_send_views: tuple[list[Tensor], dict[MatrixJob, list[Tensor]]] | None = None

    def take_gather_buffers(self) -> None:
        """Take the memory for the way to the owners now: on CUDA it belongs to the stream that is current then."""
        for direction in (_SENT, _RECEIVED):
            self._buffer(self.pieces.gather, direction)

    def pack(self, jobs: Sequence[MatrixJob], pieces: Sequence[Tensor]) -> None:
        """Take the calling rank's piece of some of the jobs; those for other owners are copied."""
        views = self._send_views()
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for job, piece in zip(jobs, pieces, strict=True):
            for view in views.get(job, ()):
                targets.append(view)
                sources.append(piece)
            if job in self._owned:
                self._own_pieces[job] = piece
        _copy(targets, sources)

    def is_packed(self, jobs: Sequence[MatrixJob], pieces: Sequence[Tensor]) -> list[Tensor]:
        """Whether the pieces of some of the jobs have the bits of those that were packed: bools on the device."""
        views = self._send_views()
        return [
            (packed == piece.to(packed.dtype)).all()
            for job, piece in zip(jobs, pieces, strict=True)
            for packed in (*views.get(job, ()), *self._own_piece(job))
        ]

    def _own_piece(self, job: MatrixJob) -> list[Tensor]:
        piece = self._own_pieces.get(job)
        return [] if piece is None else [piece]

    def _send_views(self) -> dict[MatrixJob, list[Tensor]]:
        """Where the pieces of each job go; a piece for several owners is there once for each."""
        views = self._views(self.pieces.gather, _SENT)
        if self._cached_send_views is None or self._cached_send_views[0] is not views:
            by_job: dict[MatrixJob, list[Tensor]] = {}
            for (job, _), view in zip(self.pieces.gather.sent, views, strict=True):
                by_job.setdefault(job, []).append(view)
            self._cached_send_views = views, by_job
        return self._cached_send_views[1]

    def unpack(self, matrices: Sequence[Tensor]) -> None:
        """Fill the whole matrices (box shape) that this rank owns, in the order of ``owned``."""
        leg, parts = self.pieces.gather, self._parts(matrices)
        targets = [parts[job][box.start] for job, box in leg.received]
        sources = list(self._views(leg, _RECEIVED))
        for job, piece in self._own_pieces.items():
            targets.append(parts[job][job.pieces.by_rank[self.axes.rank].start])
            sources.append(piece)
        _copy(targets, sources)
        self._own_pieces = {}

    def pack_updates(self, updates: Sequence[Tensor]) -> None:
        """Take the update of every owned matrix."""
        leg, parts, me = self.pieces.scatter, self._parts(updates), self.axes.rank
        _copy(self._views(leg, _SENT), [parts[job][box.start] for job, box in leg.sent])
        self._own_pieces = {
            job: parts[job][job.pieces.by_rank[me].start].to(self._pool.dtype)
            for job in self.owned
            if me in job.pieces.by_rank
        }

    def updates(self) -> dict[MatrixJob, Tensor]:
        """The calling rank's piece of the update of every job; views of the buffers, valid until the slot is reused."""
        leg = self.pieces.scatter
        received = zip((job for job, _ in leg.received), self._views(leg, _RECEIVED), strict=True)
        found = dict(received) | self._own_pieces
        self._own_pieces = {}
        return found

    def _parts(self, matrices: Sequence[Tensor]) -> dict[MatrixJob, dict[tuple[int, ...], Tensor]]:
        """What each rank holds of the owned matrices, by the start of its box."""
        return {job: job.pieces.views(whole, job.matrix.box) for job, whole in zip(self.owned, matrices, strict=True)}

    def sent(self, leg: Leg) -> Tensor:
        """The buffer that goes to the others."""
        return self._buffer(leg, _SENT)

    def received(self, leg: Leg) -> Tensor:
        """The buffer that is filled by the others."""
        return self._buffer(leg, _RECEIVED)

    def _buffer(self, leg: Leg, direction: str) -> Tensor:
        slot = self.slots[leg.name == "scatter"]
        layout = leg.send_layout if direction == _SENT else leg.receive_layout
        return self._pool.take(f"{leg.name}-{direction}-{slot}", layout.numel)

    def _views(self, leg: Leg, direction: str) -> list[Tensor]:
        """The parts of a buffer; kept, because making hundreds of views takes as long as filling them."""
        layout = leg.send_layout if direction == _SENT else leg.receive_layout
        if not layout.shapes:
            return []
        buffer = self._buffer(leg, direction)
        key = f"{leg.name}-{direction}"
        cached = self._cached_views.get(key)
        if cached is None or cached[0] is not buffer:
            cached = self._cached_views[key] = (buffer, layout.views(buffer))
        return cached[1]


def _layout(messages: Iterable[tuple[int, _Message]], num_ranks: int) -> Parts:
    pieces = [(rank, box.shape) for rank, message in messages for _, box in message]
    return parts([rank for rank, _ in pieces], [shape for _, shape in pieces], num_ranks)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        foreach.copy_(list(targets), list(sources))
