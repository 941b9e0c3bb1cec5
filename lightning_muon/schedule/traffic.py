"""How matrices lie on ranks, and how many elements each sends and receives for given owners.

The gather: an owner takes pieces from the ranks of its own replica, since replicas hold equal momenta. The scatter:
every rank that is no owner gets its piece of the update from the only one. A rank's own piece never travels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Owners = tuple[int, ...]
"""Ranks of the exchange group that run Newton-Schulz for a matrix, ascending: one, or all of them."""


class MatrixShards:
    """One way in which matrices lie on the ranks of an exchange group.

    Matrices that lie alike share one object: planning for thousands of ranks is then fast.
    """

    def __init__(self, held: Sequence[int], replica_of: Sequence[int]) -> None:
        self.held = tuple(held)  # Number of elements on each rank; the ranks of one replica hold all of them together.
        # Replica of each rank. Sharded over all ranks: all 0. Replicated: each rank its own. A (replicate, shard) grid:
        # the index along the replicate axis.
        self.replica_of = tuple(replica_of)
        # Replica -> its ranks with elements, and how many each has.
        self.by_replica: dict[int, list[tuple[int, int]]] = {}
        filled = [rank for rank, count in enumerate(held) if count]
        for rank in filled:
            self.by_replica.setdefault(replica_of[rank], []).append((rank, held[rank]))
        # The rank that holds all elements while no other has any; rank 0 if there are no elements.
        self.sole_holder = 0 if not filled else filled[0] if len(filled) == 1 else None

    @property
    def is_divided(self) -> bool:
        """Whether several ranks of one replica have elements."""
        return any(len(ranks) > 1 for ranks in self.by_replica.values())


@dataclass(frozen=True, kw_only=True)
class MatrixSpec:
    """What the planner must know of one matrix."""

    name: str  # Qualified name, for people.
    rows: int
    cols: int
    flops: int  # Cost of Newton-Schulz.
    shards: MatrixShards  # How it lies on the ranks of its exchange group.
    # Elements of the wire that travel with it: values of its neurons that each rank holds, some on several ranks.
    neuron_shards: MatrixShards | None = None
    sums_pieces: bool = False  # Whether ranks need sums over its pieces, which lie on several of them.

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.cols

    @property
    def travelling(self) -> list[tuple[MatrixShards, int]]:
        """How everything lies that travels to the owner and back, and how many elements each replica has of it."""
        found = [(self.shards, self.numel)]
        if self.neuron_shards is not None and self.neuron_shards.by_replica:
            holders = next(iter(self.neuron_shards.by_replica.values()))
            found.append((self.neuron_shards, sum(count for _, count in holders)))
        return found


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Elements of some matrices that each rank holds, owns, sends and receives. Gathers stay within a replica."""

    held: list[int]
    owned: list[int]
    gather_sent: list[int]
    gather_received: list[int]
    scatter_sent: tuple[list[int], list[int]]  # Within a replica, and between replicas; so is the next one.
    scatter_received: tuple[list[int], list[int]]


def count_elements(owners: Mapping[int, Owners], specs: Sequence[MatrixSpec]) -> Traffic:
    """Count what the given matrices (index -> owners) cost each rank, without a look at pairs of ranks."""
    replica_of = specs[0].shards.replica_of
    held, owned, gather_sent, gather_received = ([0] * len(replica_of) for _ in range(4))
    sent_within, sent_between, received_within, received_between = ([0] * len(replica_of) for _ in range(4))
    num_alike: Counter[MatrixShards] = Counter()
    # By shards and replica: owners there, and matrices with an owner there.
    num_owners, num_served = Counter[tuple[MatrixShards, int]](), Counter[tuple[MatrixShards, int]]()
    alike = Counter((*each, chosen) for matrix, chosen in owners.items() for each in specs[matrix].travelling)
    for (shards, whole, chosen), times in alike.items():
        num_alike[shards] += times
        for owner in chosen:
            own, replica = times * shards.held[owner], replica_of[owner]
            numel = times * whole if replica in shards.by_replica else 0
            num_owners[shards, replica] += times
            owned[owner] += numel
            gather_received[owner] += numel - own
            # Below, ranks send all of their pieces and get all of their updates sent.
            gather_sent[owner] -= own
            received_within[owner] -= own
            if len(chosen) == 1:
                sent_within[owner] += numel - own
                sent_between[owner] += times * whole * len(shards.by_replica.keys() - {replica})
        for replica in {replica_of[owner] for owner in chosen}:
            num_served[shards, replica] += times
    for shards, times in num_alike.items():
        for replica, holders in shards.by_replica.items():
            for rank, elements in holders:
                held[rank] += elements * times
                gather_sent[rank] += elements * num_owners[shards, replica]
                received_within[rank] += elements * num_served[shards, replica]
                received_between[rank] += elements * (times - num_served[shards, replica])
    return Traffic(
        held=held,
        owned=owned,
        gather_sent=gather_sent,
        gather_received=gather_received,
        scatter_sent=(sent_within, sent_between),
        scatter_received=(received_within, received_between),
    )
