"""How the matrices of one bucket reach their owners and how the updates come back.

An owner takes the pieces of its matrices from the ranks of its own replica and sends the updates to every rank that it
serves. A rank's own piece never travels, and what several ranks get is packed once. All tensors of a bucket are in the
wire dtype, so that a matrix gives the same update whoever owns it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property, partial
from operator import itemgetter

import torch.distributed as dist
from torch import Tensor

from lightning_muon.comm.collectives import AxisGroup, BufferPool, PeerSplits, start_all_to_all, start_messages
from lightning_muon.compat import foreach
from lightning_muon.params.layout import Box, Matrix
from lightning_muon.schedule.exchange import ExchangeGroup

_Piece = tuple[Matrix, Box]
# Pieces, each with the other rank that gets or sends it.
_Addressed = Sequence[tuple[int, _Piece]]


class Leg:
    """One direction: who sends which pieces to whom, and where they lie in the packed buffers."""

    def __init__(
        self, name: str, outgoing: _Addressed, incoming: _Addressed, *, num_ranks: int, is_all_to_all: bool
    ) -> None:
        self.name = name
        # Ranks with equal messages share one region of the send buffer, but not in an all-to-all.
        messages: dict[int, list[_Piece]] = {}
        for rank, piece in outgoing:
            messages.setdefault(rank, []).append(piece)
        first_with: dict[tuple[_Piece, ...] | int, int] = {}
        self._region_of = {
            rank: first_with.setdefault(rank if is_all_to_all else tuple(messages[rank]), rank)
            for rank in sorted(messages)
        }
        regions = set(first_with.values())
        self.sent, self.send_layout = _packed([each for each in outgoing if each[0] in regions], num_ranks)
        self.received, self.receive_layout = _packed(incoming, num_ranks)
        # Begins the communication from buffer `send` to buffer `receive`; every rank of `group` must call it. One
        # uneven all-to-all does if the messages of every rank of the group differ.
        self.start: Callable[..., Sequence[dist.Work]] = self._start_messages
        if is_all_to_all:
            self.start = partial(start_all_to_all, to=self.send_layout.splits, source=self.receive_layout.splits)

    def _start_messages(self, send: Tensor, receive: Tensor, group: AxisGroup) -> Sequence[dist.Work]:
        """Collective over ``group``."""
        regions, sources = self.send_layout.by_peer(send), self.receive_layout.by_peer(receive)
        return start_messages(
            {rank: regions[region] for rank, region in self._region_of.items()},
            {rank: source for rank, source in enumerate(sources) if source.numel()},
            group,
        )


def _packed(addressed: _Addressed, num_ranks: int) -> tuple[Sequence[_Piece], PeerSplits]:
    """The pieces in the order of a packed buffer, and where they lie in it."""
    pieces = sorted(addressed, key=itemgetter(0))
    splits = [0] * num_ranks
    for rank, (_, box) in pieces:
        splits[rank] += box.numel
    return [piece for _, piece in pieces], PeerSplits(tuple(box.shape for _, (_, box) in pieces), tuple(splits))


class Transfer:
    """The exchange of the ``matrices`` of a bucket. The order of calls: pack, unpack, pack_updates, updates.

    ``slots``: leg -> which of the rolling buffers of the ``pool`` it uses.
    """

    def __init__(
        self, group: ExchangeGroup, matrices: tuple[Matrix, ...], pool: BufferPool, slots: Mapping[str, str]
    ) -> None:
        self.group, self.matrices, self._pool, self.slots = group, matrices, pool, slots
        me = group.axes.rank
        # Those of which the calling rank has a piece, and those that it orthogonalizes.
        self.held = [matrix for matrix in matrices if me in matrix.pieces]
        self.owned = [matrix for matrix in matrices if me == matrix.owner]
        self._to_keep = frozenset(self.owned)
        self._own_pieces: dict[Matrix, Tensor] = {}
        self._cached_views: dict[str, tuple[Tensor, list[Tensor]]] = {}

    @cached_property
    def gather(self) -> Leg:
        """The leg that takes pieces to the owners of the same replica."""
        replica_of, me = self.group.replica_of, self.group.axes.rank
        peers = {rank for rank, replica in enumerate(replica_of) if rank != me and replica == replica_of[me]}
        outgoing = [(matrix.owner, (matrix, matrix.pieces[me])) for matrix in self.held if matrix.owner in peers]
        incoming = [
            (rank, (matrix, piece)) for matrix in self.owned for rank, piece in matrix.pieces.items() if rank in peers
        ]
        return Leg("gather", outgoing, incoming, num_ranks=len(replica_of), is_all_to_all=True)

    @cached_property
    def scatter(self) -> Leg:
        """The leg that takes updates to all ranks that hold pieces."""
        replica_of, me = self.group.replica_of, self.group.axes.rank
        outgoing = [
            (rank, (matrix, piece)) for matrix in self.owned for rank, piece in matrix.pieces.items() if rank != me
        ]
        incoming = [(matrix.owner, (matrix, matrix.pieces[me])) for matrix in self.held if matrix.owner != me]
        has_one_replica = len(set(replica_of)) == 1
        return Leg("scatter", outgoing, incoming, num_ranks=len(replica_of), is_all_to_all=has_one_replica)

    @cached_property
    def _sent_at(self) -> Mapping[Matrix, int]:
        """Place of each matrix's piece in the buffer for the owners."""
        return {matrix: place for place, (matrix, _) in enumerate(self.gather.sent)}

    def pack(self, matrices: Sequence[Matrix], pieces: Sequence[Tensor]) -> None:
        """Take the calling rank's piece of some matrices; copy those for other owners into the buffer."""
        views, piece_of = self._views(self.gather, is_sent=True), dict(zip(matrices, pieces, strict=True))
        sent = [matrix for matrix in matrices if matrix in self._sent_at]
        _copy([views[self._sent_at[matrix]] for matrix in sent], [piece_of[matrix] for matrix in sent])
        self._own_pieces |= {matrix: piece for matrix, piece in piece_of.items() if matrix in self._to_keep}

    def unpack(self, wholes: Mapping[Matrix, Tensor]) -> None:
        """Fill the whole matrices (box shape) that this rank owns."""
        leg, parts, me = self.gather, _parts(wholes), self.group.axes.rank
        targets = [parts[matrix][box.start] for matrix, box in leg.received]
        sources = list(self._views(leg, is_sent=False))
        for matrix, piece in self._own_pieces.items():
            targets.append(parts[matrix][matrix.pieces[me].start])
            sources.append(piece)
        _copy(targets, sources)
        self._own_pieces = {}

    def pack_updates(self, updates: Mapping[Matrix, Tensor]) -> None:
        """Pack the update of every owned matrix."""
        leg, parts, me = self.scatter, _parts(updates), self.group.axes.rank
        _copy(self._views(leg, is_sent=True), [parts[matrix][box.start] for matrix, box in leg.sent])
        # A copy on CUDA, where what the parts belong to may be written again before it is read.
        self._own_pieces = {
            matrix: parts[matrix][matrix.pieces[me].start].to(self._pool.dtype, copy=self._pool.device.type == "cuda")
            for matrix in self.owned
            if me in matrix.pieces
        }

    def updates(self) -> dict[Matrix, Tensor]:
        """The calling rank's pieces of the updates; views of the buffers, valid until the slot is reused."""
        leg = self.scatter
        received = zip((matrix for matrix, _ in leg.received), self._views(leg, is_sent=False), strict=True)
        found = dict(received) | self._own_pieces
        self._own_pieces = {}
        return found

    def buffer(self, leg: Leg, *, is_sent: bool) -> Tensor:
        """The buffer that is sent to the other ranks, or the one that they fill."""
        direction, layout = ("sent", leg.send_layout) if is_sent else ("received", leg.receive_layout)
        return self._pool.take(f"{leg.name}-{direction}-{self.slots[leg.name]}", layout.numel)

    def _views(self, leg: Leg, *, is_sent: bool) -> list[Tensor]:
        """Views of the parts of a buffer; cached, because making hundreds of views takes as long as filling them."""
        layout = leg.send_layout if is_sent else leg.receive_layout
        if not layout.shapes:
            return []
        buffer, key = self.buffer(leg, is_sent=is_sent), f"{leg.name} {is_sent}"
        if key not in self._cached_views or self._cached_views[key][0] is not buffer:
            self._cached_views[key] = (buffer, layout.views(buffer))
        return self._cached_views[key][1]


def _parts(wholes: Mapping[Matrix, Tensor]) -> dict[Matrix, dict[tuple[int, ...], Tensor]]:
    """Views of each rank's piece of whole matrices, by the start of its box."""
    return {matrix: matrix.views(whole) for matrix, whole in wholes.items()}


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target; one launch for those of one dtype whose strides are those of their targets."""
    alike: dict[Hashable, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        key = source.dtype, source.stride() == target.stride()
        for tensors, tensor in zip(alike.setdefault(key, ([], [])), (target, source), strict=True):
            tensors.append(tensor)
    for group in alike.values():
        foreach.copy_(*group)
