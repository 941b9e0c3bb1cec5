"""How the matrices of one bucket reach their owners and how the updates come back.

An owner takes the pieces of its matrices from the ranks of its own replica and sends the updates to every rank that it
serves. A rank's own piece never travels, and what several ranks get is packed once. All tensors of a bucket are in the
wire dtype, so that a matrix gives the same update whoever owns it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from operator import itemgetter

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_muon.comm.collectives import AxisGroup, BufferPool, start_all_to_all, start_messages
from lightning_muon.compat import foreach
from lightning_muon.params.layout import Box, Matrix
from lightning_muon.schedule.exchange import ExchangeGroup

_Piece = tuple[Matrix, Box]
# Pieces, each with the other rank that gets or sends it.
_Addressed = Sequence[tuple[int, _Piece]]


class Packed:
    """Pieces in one flat buffer, which is that of ``name`` in the ``pool``: all of rank 0, then those of rank 1, ..."""

    def __init__(self, addressed: _Addressed, num_ranks: int, pool: BufferPool, name: str) -> None:
        pieces = sorted(addressed, key=itemgetter(0))
        self._pieces: list[_Piece] = [piece for _, piece in pieces]
        self.splits = [0] * num_ranks  # Elements of each rank.
        for rank, (_, box) in pieces:
            self.splits[rank] += box.numel
        self._pool, self._name = pool, name
        pool.reserve(name, sum(self.splits))

    @cached_property
    def buffer(self) -> Tensor:
        """The buffer; not to be asked for before all transfers of a plan were made, which may need a larger one."""
        return self._pool.take(self._name, sum(self.splits))

    @cached_property
    def views(self) -> list[tuple[Matrix, Box, Tensor]]:
        """A view of each piece; kept, because making hundreds of views takes as long as filling them."""
        sizes = [box.numel for _, box in self._pieces] or [0]
        flat = zip(self._pieces, torch.split(self.buffer, sizes), strict=False)
        return [(matrix, box, view.view(box.shape)) for (matrix, box), view in flat]


class Leg:
    """One direction: who sends which pieces to whom, and where they lie in the packed buffers."""

    def __init__(
        self,
        outgoing: _Addressed,
        incoming: _Addressed,
        group: AxisGroup,
        pool: BufferPool,
        *,
        name: str,
        is_all_to_all: bool,
    ) -> None:
        """``is_all_to_all``: the messages of every rank of the group differ, so that one uneven all-to-all does."""
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
        self.sent = Packed([each for each in outgoing if each[0] in regions], group.size, pool, f"{name}-sent")
        self.received = Packed(incoming, group.size, pool, f"{name}-received")
        self._group, self._is_all_to_all = group, is_all_to_all

    def start(self) -> Sequence[dist.Work]:
        """Begin the communication from one buffer to the other. Collective over the group."""
        sent, received = self.sent, self.received
        if self._is_all_to_all:
            return start_all_to_all(sent.buffer, sent.splits, received.buffer, received.splits, self._group)
        regions, sources = torch.split(sent.buffer, sent.splits), torch.split(received.buffer, received.splits)
        return start_messages(
            {rank: regions[region] for rank, region in self._region_of.items()},
            {rank: source for rank, source in enumerate(sources) if source.numel()},
            self._group,
        )


class Transfer:
    """The exchange of the ``matrices`` of a bucket. The order of calls: pack, unpack, pack_updates, updates.

    ``slots``: which of the rolling buffers of the ``pool`` the way to the owners uses, and which the way back.
    """

    def __init__(
        self, group: ExchangeGroup, matrices: tuple[Matrix, ...], pool: BufferPool, slots: tuple[int, int]
    ) -> None:
        self.matrices, self._pool, self._me = matrices, pool, group.axes.rank
        me, replica_of = self._me, group.replica_of
        # Those of which the calling rank has a piece, and those that it orthogonalizes.
        self.held = [matrix for matrix in matrices if me in matrix.pieces]
        self.owned = [matrix for matrix in matrices if me == matrix.owner]
        self._own_pieces: dict[Matrix, Tensor] = {}
        pieces = [(rank, (matrix, piece)) for matrix in self.owned for rank, piece in matrix.pieces.items()]
        held = [(matrix.owner, (matrix, matrix.pieces[me])) for matrix in self.held]
        peers = {rank for rank, replica in enumerate(replica_of) if rank != me and replica == replica_of[me]}
        to_owners, at_owner = ([each for each in some if each[0] in peers] for some in (held, pieces))
        # To the owners of the same replica, and back to all ranks that hold pieces.
        self.gather = Leg(to_owners, at_owner, group.axes, pool, name=f"gather-{slots[0]}", is_all_to_all=True)
        updates, back = ([each for each in some if each[0] != me] for some in (pieces, held))
        has_one_replica = len(set(replica_of)) == 1
        self.scatter = Leg(updates, back, group.axes, pool, name=f"scatter-{slots[1]}", is_all_to_all=has_one_replica)

    @cached_property
    def _to_owners(self) -> Mapping[Matrix, Tensor]:
        """Where the calling rank's piece of each matrix of another owner goes."""
        return {matrix: view for matrix, _, view in self.gather.sent.views}

    def pack(self, matrices: Sequence[Matrix], pieces: Sequence[Tensor]) -> None:
        """Take the calling rank's piece of some matrices; copy those for other owners into the buffer."""
        targets, given = self._to_owners, list(zip(matrices, pieces, strict=True))
        _copy((targets[matrix], piece) for matrix, piece in given if matrix in targets)
        self._own_pieces.update((matrix, piece) for matrix, piece in given if matrix.owner == self._me)

    def unpack(self, wholes: Mapping[Matrix, Tensor]) -> None:
        """Fill the whole matrices (box shape) that this rank owns."""
        parts = _parts(wholes)
        pairs = [(parts[matrix][box.start], view) for matrix, box, view in self.gather.received.views]
        pairs += [(parts[matrix][matrix.pieces[self._me].start], own) for matrix, own in self._own_pieces.items()]
        _copy(pairs)
        self._own_pieces = {}

    def pack_updates(self, updates: Mapping[Matrix, Tensor]) -> None:
        """Pack the update of every owned matrix."""
        parts, me = _parts(updates), self._me
        _copy((view, parts[matrix][box.start]) for matrix, box, view in self.scatter.sent.views)
        # A copy on CUDA, where what the parts belong to may be written again before it is read.
        self._own_pieces = {
            matrix: parts[matrix][matrix.pieces[me].start].to(self._pool.dtype, copy=self._pool.device.type == "cuda")
            for matrix in self.owned
            if me in matrix.pieces
        }

    def updates(self) -> dict[Matrix, Tensor]:
        """The calling rank's pieces of the updates; views of the buffers, valid until the slot is reused."""
        found = {matrix: view for matrix, _, view in self.scatter.received.views} | self._own_pieces
        self._own_pieces = {}
        return found


def _parts(wholes: Mapping[Matrix, Tensor]) -> dict[Matrix, dict[tuple[int, ...], Tensor]]:
    """Views of each rank's piece of whole matrices, by the start of its box."""
    return {matrix: matrix.views(whole) for matrix, whole in wholes.items()}


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy to each target its source; one launch for those of one dtype whose strides are those of their targets."""
    alike: dict[Hashable, list[tuple[Tensor, Tensor]]] = {}
    for pair in pairs:
        target, source = pair
        alike.setdefault((source.dtype, source.stride() == target.stride()), []).append(pair)
    for group in alike.values():
        targets, sources = zip(*group, strict=True)
        foreach.copy_(list(targets), list(sources))
