"""How many elements each rank sends and receives, for given owners.

The gather: an owner takes pieces from the ranks of its own replica, since replicas hold equal momenta. The scatter:
every rank gets its piece of the update from :func:`server_of`. A rank's own piece never travels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_muon.schedule.holdings import Holdings, Layout

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


def count_elements(owners: Mapping[int, Owners], where: Holdings) -> list[RankTraffic]:
    """Elements of the given matrices that each rank holds, owns, sends and receives.

    Takes time in the number of matrices plus, for each different layout, the number of ranks; pairs of ranks are not
    looked at.

    Args:
        owners: Matrix -> its owners. Share one tuple among matrices that all ranks own.
        where: Which rank holds what.
    """
    counts = _Counts(where.num_ranks)
    for (layout_index, _), (chosen, times) in _alike(owners, where).items():
        counts.add(layout_index, where.layouts[layout_index], chosen, times, where.replica_of)
    for layout_index, times in Counter(where.layout_of[matrix] for matrix in owners).items():
        for holders in where.layouts[layout_index].by_replica.values():
            for rank, elements in holders:
                counts.held[rank] += elements * times
    for (layout_index, replica), (num_owners, num_served) in counts.served.items():
        for rank, elements in where.layouts[layout_index].by_replica.get(replica, ()):
            counts.gather_sent[rank] += elements * num_owners
            counts.served_within[rank] += elements * num_served
    return counts.result()


def _alike(owners: Mapping[int, Owners], where: Holdings) -> dict[tuple[int, int], tuple[Owners, int]]:
    """Matrices with one layout and one tuple of owners, and how many they are."""
    found: dict[tuple[int, int], tuple[Owners, int]] = {}
    for matrix, chosen in owners.items():
        key = (where.layout_of[matrix], id(chosen))
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
        # (layout, replica) -> owners there, and matrices with an owner there.
        self.served: dict[tuple[int, int], tuple[int, int]] = {}

    def add(self, layout_index: int, layout: Layout, owners: Owners, times: int, replica_of: Sequence[int]) -> None:
        """Count ``times`` matrices that lie and are owned alike."""
        by_replica: dict[int, list[int]] = {}
        for owner in owners:
            by_replica.setdefault(replica_of[owner], []).append(owner)
        unserved = layout.total
        for replica, members in by_replica.items():
            numel = layout.replica_numel.get(replica, 0)
            num_owners, num_served = self.served.get((layout_index, replica), (0, 0))
            self.served[layout_index, replica] = (num_owners + times * len(members), num_served + times)
            unserved -= numel
            to_serve = numel
            for owner in members:
                own = layout.held[owner]
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
