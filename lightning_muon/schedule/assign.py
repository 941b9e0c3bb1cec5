"""Who computes what."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, get_args

from lightning_muon.schedule.program import UNASSIGNED, Op, Program

Strategy = Literal["round_robin", "lpt", "redundant"]
Load = tuple[int, int]
"""FLOPs and bytes of a rank."""


def assign_owners(
    program: Program,
    *,
    costs: Sequence[int],
    sizes: Sequence[int],
    sole_holders: Sequence[int | None],
    loads: Sequence[Load],
    strategy: Strategy,
) -> Program:
    """Divide the op of each bucket among the ranks; a rank that gets nothing of it has no op.

    A matrix that lies on one rank alone stays there and counts in that rank's load before all others are assigned.

    Args:
        program: One unassigned op per bucket.
        costs: FLOPs of each matrix.
        sizes: Bytes of each matrix; they break ties between equal loads.
        sole_holders: For each matrix the rank that has all of it, or None.
        loads: What each rank has to do already.
        strategy: ``"lpt"``: :func:`longest_first` bucket by bucket with loads that add up, then
            :func:`~.exchange.even_out` on the last buckets, which no later bucket can even out. ``"round_robin"``: the
            i-th matrix to rank ``i % num_ranks``. ``"redundant"``: every matrix to every rank, as where all ranks
            gather all momenta (Liu et al. 2025, arXiv:2502.16982, compare with that).
    """
    if strategy not in get_args(Strategy):
        raise ValueError(f"strategy must be one of {get_args(Strategy)}, got {strategy!r}")
    loads = list(loads)
    buckets = program[UNASSIGNED]
    for matrix in (item for op in buckets for item in op.items):
        holder = sole_holders[matrix]
        if holder is not None:
            loads[holder] = (loads[holder][0] + costs[matrix], loads[holder][1])
    owners: list[dict[int, int]] = []
    turn = 0
    for op in buckets:
        shared = [item for item in op.items if sole_holders[item] is None]
        if strategy == "lpt":
            owners.append(longest_first(costs, sizes, loads, taken=shared))
        else:
            owners.append({matrix: (turn + place) % len(loads) for place, matrix in enumerate(shared)})
            turn += len(shared)
    if strategy == "lpt":
        even_out(owners[-EVENED_BUCKETS:], costs, sizes, loads)
    assigned: Program = {rank: [] for rank in range(len(loads))}
    for op, owner_of in zip(buckets, owners, strict=True):
        if strategy == "redundant" and owner_of:
            everyone = dict.fromkeys(assigned, op.items)
        else:
            everyone = _by_owner(op, owner_of, sole_holders)
        for rank, items in everyone.items():
            cost = op.cost if items is op.items else sum(costs[item] for item in items)
            assigned[rank].append(replace(op, rank=rank, items=items, cost=cost))
    return assigned


def _by_owner(op: Op, owner_of: dict[int, int], sole_holders: Sequence[int | None]) -> dict[int, tuple[int, ...]]:
    owned: dict[int, list[int]] = {}
    for matrix in op.items:
        holder = sole_holders[matrix]
        owned.setdefault(owner_of[matrix] if holder is None else holder, []).append(matrix)
    return {rank: tuple(items) for rank, items in owned.items()}


def longest_first(
    costs: Sequence[int], sizes: Sequence[int], loads: list[Load], *, taken: Sequence[int]
) -> dict[int, int]:
    """Give each job, dearest first, to the rank with the least load so far; a rank is within 4/3 of the optimum.

    Takes ``O(n log n)`` for n jobs and ranks.

    Args:
        costs: FLOPs of every job.
        sizes: Bytes of every job; they break ties between equal loads.
        loads: Of every rank. Updated in place, so that the next bucket evens this one out.
        taken: Indices of the jobs to assign.

    Returns:
        Job index -> rank, the same on every rank.

    Source: Graham 1969, Bounds on multiprocessing timing anomalies.
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


class _Exchange(NamedTuple):
    """Give ``matrix`` of a bucket to ``rank`` and take ``other`` (-1: nothing) for it; ordered by what is best."""

    larger_load: int
    bucket: int
    matrix: int
    rank: int
    other: int


def even_out(
    owners: Sequence[dict[int, int]], costs: Sequence[int], sizes: Sequence[int], loads: list[tuple[int, int]]
) -> None:
    """Relieve the busiest rank by the exchange that helps most, again and again, until none does.

    A matrix goes to another rank, alone or in exchange for a cheaper matrix of the same bucket; then both ranks have
    less to do than the busiest had. The order is fixed, so all ranks that plan come to the same owners.

    Args:
        owners: For each bucket its matrices and their owners. Updated in place.
        costs: FLOPs of every matrix.
        sizes: Bytes of every matrix.
        loads: FLOPs and bytes of every rank. Updated in place.
    """
    compared = 0
    while compared < MOST_COMPARISONS:
        busiest = max(range(len(loads)), key=lambda rank: (loads[rank][0], -rank))
        best: _Exchange | None = None
        for number, bucket in enumerate(owners):
            for matrix in [matrix for matrix, owner in bucket.items() if owner == busiest]:
                compared += len(bucket)
                best = min(filter(None, (best, _best_exchange(number, bucket, matrix, costs, loads))), default=None)
        if best is None:
            return
        moves = [(best.matrix, busiest, best.rank), (best.other, best.rank, busiest)]
        for matrix, source, target in moves[: 1 if best.other < 0 else 2]:
            loads[source] = (loads[source][0] - costs[matrix], loads[source][1] - sizes[matrix])
            loads[target] = (loads[target][0] + costs[matrix], loads[target][1] + sizes[matrix])
            owners[best.bucket][matrix] = target


def _best_exchange(
    number: int, bucket: dict[int, int], matrix: int, costs: Sequence[int], loads: Sequence[tuple[int, int]]
) -> _Exchange | None:
    """What takes most load from the owner of ``matrix`` without making another rank as busy."""
    load = loads[bucket[matrix]][0]
    idlest = min(range(len(loads)), key=lambda rank: (loads[rank][0], rank))
    partners = [(idlest, -1, costs[matrix])]
    partners += [(rank, other, costs[matrix] - costs[other]) for other, rank in bucket.items()]
    return min(
        (
            _Exchange(max(load - relief, loads[rank][0] + relief), number, matrix, rank, other)
            for rank, other, relief in partners
            if 0 < relief < load - loads[rank][0]
        ),
        default=None,
    )
