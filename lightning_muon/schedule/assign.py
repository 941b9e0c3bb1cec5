"""Who computes what."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

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
    """Divide the op of each chunk among the ranks; a rank that gets nothing has an op without items.

    A matrix that lies on one rank alone stays there and counts in that rank's load before all others are assigned.

    Args:
        program: One unassigned op per chunk.
        costs: FLOPs of each matrix.
        sizes: Bytes of each matrix; they break ties between equal loads.
        sole_holders: For each matrix the rank that has all of it, or None.
        loads: What each rank has to do already.
        strategy: ``"lpt"``: see :func:`longest_first`; loads add up over the chunks. ``"round_robin"``: the i-th matrix
            to rank ``i % num_ranks``. ``"redundant"``: every matrix to every rank, as where all ranks gather all
            momenta (Liu et al. 2025, arXiv:2502.16982, compare with that).
    """
    if strategy not in get_args(Strategy):
        raise ValueError(f"strategy must be one of {get_args(Strategy)}, got {strategy!r}")
    loads = list(loads)
    chunks = program[UNASSIGNED]
    for matrix in (item for op in chunks for item in op.items):
        holder = sole_holders[matrix]
        if holder is not None:
            loads[holder] = (loads[holder][0] + costs[matrix], loads[holder][1])
    assigned: Program = {rank: [] for rank in range(len(loads))}
    turn = 0
    for op in chunks:
        shared = [item for item in op.items if sole_holders[item] is None]
        owner_of = {item: holder for item in op.items if (holder := sole_holders[item]) is not None}
        if strategy == "redundant" and shared:
            for rank, ops in assigned.items():
                ops.append(replace(op, rank=rank))
            continue
        if strategy == "round_robin":
            owner_of |= {matrix: (turn + place) % len(loads) for place, matrix in enumerate(shared)}
            turn += len(shared)
        else:
            owner_of |= longest_first(costs, sizes, loads, taken=shared)
        _append_owned(assigned, op, owner_of, costs)
    return assigned


def _append_owned(assigned: Program, op: Op, owner_of: dict[int, int], costs: Sequence[int]) -> None:
    owned: dict[int, list[int]] = {}
    for matrix in op.items:
        owned.setdefault(owner_of[matrix], []).append(matrix)
    for rank, ops in assigned.items():
        items = tuple(owned.get(rank, ()))
        ops.append(replace(op, rank=rank, items=items, cost=sum(costs[item] for item in items)))


def longest_first(
    costs: Sequence[int], sizes: Sequence[int], loads: list[Load], *, taken: Sequence[int]
) -> dict[int, int]:
    """Give each job, dearest first, to the rank with the least load so far; a rank is within 4/3 of the optimum.

    Takes ``O(n log n)`` for n jobs and ranks.

    Args:
        costs: FLOPs of every job.
        sizes: Bytes of every job; they break ties between equal loads.
        loads: Of every rank. Updated in place, so that the next chunk evens this one out.
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
