"""Who computes what."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import chain
from typing import Literal, get_args

from lightning_muon.schedule.traffic import Owners

Strategy = Literal["round_robin", "lpt", "redundant"]
Load = tuple[int, int]
"""FLOPs and bytes of a rank."""


def assign_owners(
    buckets: Sequence[Sequence[int]],
    *,
    costs: Sequence[int],
    sizes: Sequence[int],
    sole_holders: Sequence[int | None],
    loads: Sequence[Load],
    strategy: Strategy,
) -> list[Owners]:
    """Owners of each matrix; ``costs`` are their FLOPs, ``sizes`` their bytes, ``loads`` what ranks do already.

    A matrix that lies on one rank alone stays there. ``"lpt"``: :func:`longest_first` bucket by bucket, then
    :func:`even_out` on the last ones. ``"round_robin"``: one rank after the other. ``"redundant"``: every matrix to
    every rank, the baseline of Liu et al. 2025, arXiv:2502.16982.
    """
    if strategy not in get_args(Strategy):
        raise ValueError(f"strategy must be one of {get_args(Strategy)}, got {strategy!r}")
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


# Give a matrix of a bucket to another rank, for another one or nothing (-1): the larger load of both ranks afterwards,
# then bucket, matrix, rank, other. The least is the best.
_Exchange = tuple[int, int, int, int, int]


def even_out(owners: Sequence[dict[int, int]], costs: Sequence[int], sizes: Sequence[int], loads: list[Load]) -> None:
    """Relieve the busiest rank by the exchange that helps most, until none does; in place, alike on all ranks.

    A matrix goes to another rank, alone or in exchange for a cheaper one of its bucket; both ranks then have less to
    do.
    """
    compared = 0
    while compared < MOST_COMPARISONS:
        busiest = max(range(len(loads)), key=lambda rank: (loads[rank][0], -rank))
        found: list[_Exchange] = []
        for number, bucket in enumerate(owners):
            for matrix in [matrix for matrix, owner in bucket.items() if owner == busiest]:
                compared += len(bucket)
                found += _exchanges(number, bucket, matrix, costs, loads)
        if not found:
            return
        _, number, given, rank, other = min(found)
        moves = [(given, busiest, rank), (other, rank, busiest)]
        for matrix, source, target in moves[: 1 if other < 0 else 2]:
            loads[source] = (loads[source][0] - costs[matrix], loads[source][1] - sizes[matrix])
            loads[target] = (loads[target][0] + costs[matrix], loads[target][1] + sizes[matrix])
            owners[number][matrix] = target


def _exchanges(
    number: int, bucket: dict[int, int], matrix: int, costs: Sequence[int], loads: Sequence[Load]
) -> list[_Exchange]:
    """All that take load from the owner of ``matrix`` without making another rank as busy."""
    load = loads[bucket[matrix]][0]
    idlest = min(range(len(loads)), key=lambda rank: (loads[rank][0], rank))
    partners = [(idlest, -1, costs[matrix])]
    partners += [(rank, other, costs[matrix] - costs[other]) for other, rank in bucket.items()]
    return [
        (max(load - relief, loads[rank][0] + relief), number, matrix, rank, other)
        for rank, other, relief in partners
        if 0 < relief < load - loads[rank][0]
    ]
