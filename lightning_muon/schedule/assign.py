"""Who computes what."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import chain

from lightning_muon.config import Assignment
from lightning_muon.schedule.traffic import Owners

Load = tuple[int, int]
"""FLOPs and bytes of a rank."""


def assign_owners(
    buckets: Sequence[Sequence[int]],
    *,
    costs: Sequence[int],
    sizes: Sequence[int],
    sole_holders: Sequence[int | None],
    loads: Sequence[Load],
    strategy: Assignment,
) -> list[Owners]:
    """Owners of each matrix; ``costs`` are their FLOPs, ``sizes`` their bytes, ``loads`` what ranks do already.

    A matrix that lies on one rank alone stays there. ``"lpt"``: :func:`longest_first` bucket by bucket, then
    :func:`even_out` on the last ones. ``"round_robin"``: one rank after the other. ``"redundant"``: every matrix to
    every rank, the baseline of Liu et al. 2025, arXiv:2502.16982.
    """
    loads = list(loads)
    for cost, holder in zip(costs, sole_holders, strict=True):
        if holder is not None:
            loads[holder] = (loads[holder][0] + cost, loads[holder][1])
    shared = [[matrix for matrix in bucket if sole_holders[matrix] is None] for bucket in buckets]
    owners: list[Owners] = [() if holder is None else (holder,) for holder in sole_holders]
    if strategy == "redundant":
        everyone = tuple(range(len(loads)))
        for matrix in chain.from_iterable(shared):
            owners[matrix] = everyone
    elif strategy == "round_robin":
        for turn, matrix in enumerate(chain.from_iterable(shared)):
            owners[matrix] = (turn % len(loads),)
    else:
        assigned = [longest_first(costs, sizes, loads, taken=bucket) for bucket in shared]
        even_out(assigned[-EVENED_BUCKETS:], costs, sizes, loads)
        for matrix, owner in chain.from_iterable(each.items() for each in assigned):
            owners[matrix] = (owner,)
    return owners


def longest_first(
    costs: Sequence[int], sizes: Sequence[int], loads: list[Load], *, taken: Sequence[int]
) -> dict[int, int]:
    """Job -> rank, for the jobs ``taken``: each, dearest first, to the rank with the least load; ``loads`` add up.

    The largest load is within 4/3 of the optimum (Graham 1969, Bounds on multiprocessing timing anomalies).
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


# Buckets in which owners may change. In earlier ones, later buckets have evened the loads out already, and every
# exchange makes the ranks of that bucket finish less at one time.
EVENED_BUCKETS = 4
# Comparisons of two matrices, about half a second: plans for thousands of ranks stay quick.
MOST_COMPARISONS = 1_000_000


def even_out(owners: Sequence[dict[int, int]], costs: Sequence[int], sizes: Sequence[int], loads: list[Load]) -> None:
    """Relieve the busiest rank by the exchange that helps most, until none does; in place, alike on all ranks.

    A matrix goes to another rank, alone or in exchange for a cheaper one of its bucket; both ranks then have less to
    do.
    """
    compared = 0
    while compared < MOST_COMPARISONS:
        busiest = max(range(len(loads)), key=lambda rank: (loads[rank][0], -rank))
        idlest = min(range(len(loads)), key=lambda rank: (loads[rank][0], rank))
        # The larger load of both ranks afterwards, the bucket, the matrix, to which rank, and for which one, if any.
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
