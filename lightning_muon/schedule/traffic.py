"""How many elements and bytes each rank sends and receives, for given owners, and the fewest that could do.

The gather: an owner takes pieces from the ranks of its own replica, since replicas hold equal momenta. The scatter:
every rank gets its piece of the update from :func:`server_of`. A rank's own piece never travels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_muon.schedule.matrix_shards import MatrixShards, MatrixSpec, ShardedMatrices, sharded_matrices

Owners = tuple[int, ...]
"""Ranks of the exchange group that run Newton-Schulz for a matrix, ascending."""


def server_of(owners: Owners, rank: int, replica_of: Sequence[int]) -> int:
    """The owner that sends ``rank`` its piece of the update: itself, else one in the same replica, else the first."""
    if rank in owners:
        return rank
    return next((owner for owner in owners if replica_of[owner] == replica_of[rank]), owners[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTraffic:
    """What one rank holds, owns, sends and receives, the last two as ``(within its replica, between replicas)``."""

    held: int = 0
    owned: int = 0
    gather_sent: tuple[int, int] = (0, 0)
    gather_received: tuple[int, int] = (0, 0)
    scatter_sent: tuple[int, int] = (0, 0)
    scatter_received: tuple[int, int] = (0, 0)


def count_elements(owners: Mapping[int, Owners], where: ShardedMatrices) -> list[RankTraffic]:
    """Elements of the given matrices that each rank holds, owns, sends and receives.

    Takes time in the number of matrices plus, for each different :class:`~.matrix_shards.MatrixShards`, the number of
    ranks; pairs of ranks are not looked at.

    Args:
        owners: Matrix -> its owners. Share one tuple among matrices that all ranks own.
        where: Which rank holds what.
    """
    counts = _Counts(where.num_ranks)
    for (shards, _), (chosen, times) in _alike(owners, where).items():
        counts.add(shards, chosen, times, where.replica_of)
    for shards, times in Counter(where.shards[matrix] for matrix in owners).items():
        for holders in shards.by_replica.values():
            for rank, elements in holders:
                counts.held[rank] += elements * times
    for (shards, replica), (num_owners, num_served) in counts.served.items():
        for rank, elements in shards.by_replica.get(replica, ()):
            counts.gather_sent[rank] += elements * num_owners
            counts.served_within[rank] += elements * num_served
    return counts.result()


def _alike(owners: Mapping[int, Owners], where: ShardedMatrices) -> dict[tuple[MatrixShards, int], tuple[Owners, int]]:
    """Matrices that lie alike and have one tuple of owners, and how many they are."""
    found: dict[tuple[MatrixShards, int], tuple[Owners, int]] = {}
    for matrix, chosen in owners.items():
        key = (where.shards[matrix], id(chosen))
        found[key] = (chosen, found[key][1] + 1 if key in found else 1)
    return found


class _Counts:
    """Running sums over matrices, one entry per rank."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.held = [0] * num_ranks
        self.owned = [0] * num_ranks
        self.own_pieces = [0] * num_ranks
        # As if each rank sent its own pieces too, and got the updates of them sent.
        self.gather_sent = [0] * num_ranks
        self.served_within = [0] * num_ranks
        self.gather_received = [0] * num_ranks
        self.sent_within = [0] * num_ranks
        self.sent_between = [0] * num_ranks
        # (shards, replica) -> owners there, and matrices with an owner there.
        self.served: dict[tuple[MatrixShards, int], tuple[int, int]] = {}

    def add(self, shards: MatrixShards, owners: Owners, times: int, replica_of: Sequence[int]) -> None:
        """Count ``times`` matrices that lie and are owned alike."""
        by_replica: dict[int, list[int]] = {}
        for owner in owners:
            by_replica.setdefault(replica_of[owner], []).append(owner)
        unserved = shards.total
        for replica, members in by_replica.items():
            numel = shards.replica_numel.get(replica, 0)
            num_owners, num_served = self.served.get((shards, replica), (0, 0))
            self.served[shards, replica] = (num_owners + times * len(members), num_served + times)
            unserved -= numel
            to_serve = numel
            for owner in members:
                own = shards.held[owner]
                self.owned[owner] += times * numel
                self.own_pieces[owner] += times * own
                self.gather_received[owner] += times * (numel - own)
                to_serve -= own
            self.sent_within[members[0]] += times * to_serve
        self.sent_between[owners[0]] += times * unserved

    def result(self) -> list[RankTraffic]:
        """The sums, without what a rank would send to itself."""
        return [
            RankTraffic(
                held=self.held[rank],
                owned=self.owned[rank],
                gather_sent=(self.gather_sent[rank] - self.own_pieces[rank], 0),
                gather_received=(self.gather_received[rank], 0),
                scatter_sent=(self.sent_within[rank], self.sent_between[rank]),
                scatter_received=(
                    self.served_within[rank] - self.own_pieces[rank],
                    self.held[rank] - self.served_within[rank],
                ),
            )
            for rank in range(self.num_ranks)
        ]


@dataclass(frozen=True, kw_only=True)
class TrafficFloor:
    """Fewest bytes of all ranks together, ``(within the replicas, between replicas)``."""

    gather: tuple[int, int]
    scatter: tuple[int, int]


def traffic(
    owners: Sequence[Owners], specs: Sequence[MatrixSpec], *, itemsize: int, replica_of: Sequence[int]
) -> list[RankTraffic]:
    """Bytes that each rank holds, owns, sends and receives in one step.

    Args:
        owners: Of each matrix.
        specs: The matrices.
        itemsize: Bytes of an element on the wire.
        replica_of: Replica of each rank.
    """
    where = sharded_matrices(specs, replica_of)
    return [_in_bytes(count, itemsize) for count in count_elements(dict(enumerate(owners)), where)]


def traffic_floor(
    owners: Sequence[Owners], specs: Sequence[MatrixSpec], *, itemsize: int, replica_of: Sequence[int]
) -> TrafficFloor:
    """Fewest bytes with which the first owner of each matrix can compute it and tell all others.

    All of a matrix but the owner's piece has to reach the owner once, from within its replica, and the same bytes have
    to go back; each of the R replicas but the owner's gets the whole update once, ``(R - 1) * numel`` together.
    """
    where = sharded_matrices(specs, replica_of)
    within, between = 0, 0
    for shards, (first, *_) in zip(where.shards, owners, strict=True):
        in_replica = shards.replica_numel.get(replica_of[first], 0)
        within += in_replica - shards.held[first]
        between += shards.total - in_replica
    return TrafficFloor(gather=(within * itemsize, 0), scatter=(within * itemsize, between * itemsize))


def _in_bytes(count: RankTraffic, itemsize: int) -> RankTraffic:
    def both(pair: tuple[int, int]) -> tuple[int, int]:
        return pair[0] * itemsize, pair[1] * itemsize

    return RankTraffic(
        held=count.held * itemsize,
        owned=count.owned * itemsize,
        gather_sent=both(count.gather_sent),
        gather_received=both(count.gather_received),
        scatter_sent=both(count.scatter_sent),
        scatter_received=both(count.scatter_received),
    )
