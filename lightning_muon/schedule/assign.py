"""Chooses buckets and owners of matrices, and counts the elements that each rank holds, sends and receives.

The gather: an owner gets pieces from the ranks of its own replica, since replicas hold equal momenta. The scatter:
every rank that is no owner gets its piece of the update from the only owner. A rank never sends its own piece.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from lightning_muon.params.matrices import Matrix
from lightning_muon.schedule.cost import PRESETS

Load = tuple[int, int]
"""FLOPs and bytes of a rank."""
_H100 = PRESETS["h100"]
# FLOP/s of Newton-Schulz over bytes/s between two replicas, per rank. CPU: measured on two cores with AVX-512 BF16 and
# gloo over loopback (benchmarks/plan_accuracy.py prints both).
_FLOPS_PER_BYTE = {"cuda": _H100.flops_per_second / _H100.bandwidth[-1], "cpu": 400.0}


def fill_buckets(
    sizes: Sequence[int], sole_holders: Sequence[int | None], *, num_owners: int, bucket_bytes: int
) -> list[tuple[int, ...]]:
    """Indices of the matrices of each bucket, the last matrix first: backward finishes gradients about in this order.

    A bucket is closed when it has a matrix for each owner and the next one would take it above ``num_owners *
    bucket_bytes``. Matrices that lie on one rank alone come first, in buckets of their own, with at most
    ``bucket_bytes`` per rank: each rank fills its own sequence of buckets, so that all ranks have work in each of them.
    """
    resident: list[list[int]] = []
    travelling: list[list[int]] = []
    # Sole holder, or None -> number of the bucket that is being filled, and its matrices and bytes so far.
    state: dict[int | None, tuple[int, int, int]] = {}
    for matrix in reversed(range(len(sizes))):
        holder = sole_holders[matrix]
        buckets, least = (travelling, num_owners) if holder is None else (resident, 1)
        number, count, filled = state.get(holder, (0, 0, 0))
        if count >= least and filled + sizes[matrix] > least * bucket_bytes:
            number, count, filled = number + 1, 0, 0
        state[holder] = (number, count + 1, filled + sizes[matrix])
        if number == len(buckets):
            buckets.append([])
        buckets[number].append(matrix)
    return [tuple(bucket) for bucket in (*resident, *travelling)]


def assign_owners(
    matrices: Sequence[Matrix], buckets: Sequence[Sequence[int]], *, itemsize: int, loads: Sequence[Load]
) -> None:
    """Set the owner of each matrix; ``loads`` are what ranks have already, ``itemsize`` are bytes on the wire.

    A matrix that lies on one rank alone stays there. The others by :func:`longest_first`, bucket by bucket, and then
    :func:`even_out` on the last buckets.
    """
    loads = list(loads)
    for matrix in matrices:
        if matrix.sole_holder is not None:
            matrix.owner = matrix.sole_holder
            loads[matrix.owner] = (loads[matrix.owner][0] + matrix.flops, loads[matrix.owner][1])
    costs = [matrix.flops for matrix in matrices]
    sizes = [matrix.numel * itemsize for matrix in matrices]
    shared = [[index for index in bucket if matrices[index].sole_holder is None] for bucket in buckets]
    assigned = [longest_first(costs, sizes, loads, taken=bucket) for bucket in shared]
    even_out(assigned[-EVENED_BUCKETS:], costs, sizes, loads)
    for index, owner in chain.from_iterable(each.items() for each in assigned):
        matrices[index].owner = owner


def longest_first(
    costs: Sequence[int], sizes: Sequence[int], loads: list[Load], *, taken: Sequence[int]
) -> dict[int, int]:
    """Job -> rank: each job of ``taken``, most expensive first, goes to the rank with the least of ``loads``.

    ``loads`` is updated in place. The largest one is within 4/3 of the optimum (Graham 1969, Bounds on multiprocessing
    timing anomalies).
    """
    heap = [(*load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    owners: dict[int, int] = {}
    for job in sorted(taken, key=lambda index: (-costs[index], -sizes[index], index)):
        load_flops, load_bytes, rank = heap[0]
        owners[job] = rank
        loads[rank] = (load_flops + costs[job], load_bytes + sizes[job])
        heapq.heapreplace(heap, (*loads[rank], rank))
    return owners


# Number of last buckets in which owners may change. Loads of earlier ones are evened out by later buckets, and every
# exchange makes the ranks finish a bucket at more different times.
EVENED_BUCKETS = 4
# Limit of comparisons of two matrices, about half a second, so that plans for thousands of ranks are quick.
MOST_COMPARISONS = 1_000_000


def even_out(owners: Sequence[dict[int, int]], costs: Sequence[int], sizes: Sequence[int], loads: list[Load]) -> None:
    """Relieve the busiest rank by the exchange that helps most, until none helps; in place, alike on all ranks.

    A matrix goes to another rank, alone or in exchange for a cheaper one of its bucket; both ranks then have less to
    do.
    """
    compared = 0
    while compared < MOST_COMPARISONS:
        busiest = max(range(len(loads)), key=lambda rank: (loads[rank][0], -rank))
        idlest = min(range(len(loads)), key=lambda rank: (loads[rank][0], rank))
        # The larger load of both ranks afterwards, bucket, matrix, its next rank, and the matrix in exchange, or -1.
        found: list[tuple[int, int, int, int, int]] = []
        for number, bucket in enumerate(owners):
            for matrix in [matrix for matrix, owner in bucket.items() if owner == busiest]:
                compared += len(bucket)
                for other, rank in [(-1, idlest), *bucket.items()]:
                    relief = costs[matrix] - (costs[other] if other >= 0 else 0)
                    if 0 < relief < loads[busiest][0] - loads[rank][0]:
                        larger = max(loads[busiest][0] - relief, loads[rank][0] + relief)
                        found.append((larger, number, matrix, rank, other))
        if not found:
            return
        _, number, given, rank, other = min(found)
        moves = [(given, busiest, rank), (other, rank, busiest)]
        for matrix, source, target in moves[: 1 if other < 0 else 2]:
            loads[source] = (loads[source][0] - costs[matrix], loads[source][1] - sizes[matrix])
            loads[target] = (loads[target][0] + costs[matrix], loads[target][1] + sizes[matrix])
            owners[number][matrix] = target


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Elements of some matrices that each rank holds, owns, sends and receives. Gathers stay within a replica."""

    held: list[int]
    owned: list[int]
    gather_sent: list[int]
    gather_received: list[int]
    scatter_sent: tuple[list[int], list[int]]  # Within a replica, and between replicas; so is the next one.
    scatter_received: tuple[list[int], list[int]]


def count_elements(matrices: Sequence[Matrix], replica_of: Sequence[int]) -> Traffic:
    """Count elements on each rank for some matrices with owners, without a loop over pairs of ranks.

    ``replica_of`` is the replica of each rank of their exchange group.
    """
    held, owned, to_owners, from_holders = ([0] * len(replica_of) for _ in range(4))
    sent_between, received_between = ([0] * len(replica_of) for _ in range(2))
    # Matrices that lie alike have one object that says so.
    held_of = {id(matrix.held): matrix.held for matrix in matrices}
    num_alike, num_owned = Counter[int](), Counter[tuple[int, int]]()  # Of that object, and by the owner's replica.
    alike = Counter((id(matrix.held), matrix.numel, matrix.owner) for matrix in matrices)
    for (key, numel, owner), times in alike.items():
        by_replica, replica = held_of[key], replica_of[owner]
        own = times * by_replica[replica].get(owner, 0)
        num_alike[key] += times
        num_owned[key, replica] += times
        owned[owner] += times * numel
        from_holders[owner] += times * numel - own
        to_owners[owner] -= own  # Below all pieces are counted.
        sent_between[owner] += times * numel * (len(by_replica) - 1)
    for key, times in num_alike.items():
        for replica, holders in held_of[key].items():
            for rank, elements in holders.items():
                held[rank] += elements * times
                to_owners[rank] += elements * num_owned[key, replica]
                received_between[rank] += elements * (times - num_owned[key, replica])
    # Within a replica updates go back the way that pieces came.
    return Traffic(
        held=held,
        owned=owned,
        gather_sent=to_owners,
        gather_received=from_holders,
        scatter_sent=(from_holders, sent_between),
        scatter_received=(to_owners, received_between),
    )


def sharing_pays(
    flops: int, wire_bytes: int, *, device_type: str, num_matrices: int, num_replicas: int, replica_ranks: int
) -> bool:
    """Whether one owner for all R replicas is faster than one in each, if all N matrices are like this one.

    With S ranks in a replica, a rank computes ``m = max(1, N / S)`` matrices if replicas repeat the work. If they share
    it, it computes ``n = max(1, N / (R S))`` and sends each to R - 1 replicas. With speed F and bandwidth B sharing is
    faster if ``(m - n) flops / F > n (R - 1) wire_bytes / B``. ``wire_bytes`` are those of the whole matrix; unknown
    devices count as CUDA.
    """
    shared = max(1.0, num_matrices / (num_replicas * replica_ranks))
    repeated = max(1.0, num_matrices / replica_ranks)
    seconds_saved = (repeated - shared) * flops / _FLOPS_PER_BYTE.get(device_type, _FLOPS_PER_BYTE["cuda"])
    return seconds_saved > shared * (num_replicas - 1) * wire_bytes
