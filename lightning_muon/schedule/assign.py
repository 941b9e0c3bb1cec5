"""Who computes what."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from lightning_muon.schedule.exchange import EVENED_CHUNKS, even_out
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
    """Divide the op of each chunk among the ranks; a rank that gets nothing of it has no op.

    A matrix that lies on one rank alone stays there and counts in that rank's load before all others are assigned.

    Args:
        program: One unassigned op per chunk.
        costs: FLOPs of each matrix.
        sizes: Bytes of each matrix; they break ties between equal loads.
        sole_holders: For each matrix the rank that has all of it, or None.
        loads: What each rank has to do already.
        strategy: ``"lpt"``: :func:`longest_first` chunk by chunk with loads that add up, then
            :func:`~.exchange.even_out` on the last chunks, which no later chunk can even out. ``"round_robin"``: the
            i-th matrix to rank ``i % num_ranks``. ``"redundant"``: every matrix to every rank, as where all ranks
            gather all momenta (Liu et al. 2025, arXiv:2502.16982, compare with that).
    """
    if strategy not in get_args(Strategy):
        raise ValueError(f"strategy must be one of {get_args(Strategy)}, got {strategy!r}")
    loads = list(loads)
    chunks = program[UNASSIGNED]
    for matrix in (item for op in chunks for item in op.items):
        holder = sole_holders[matrix]
        if holder is not None:
            loads[holder] = (loads[holder][0] + costs[matrix], loads[holder][1])
    owners: list[dict[int, int]] = []
    turn = 0
    for op in chunks:
        shared = [item for item in op.items if sole_holders[item] is None]
        if strategy == "lpt":
            owners.append(longest_first(costs, sizes, loads, taken=shared))
        else:
            owners.append({matrix: (turn + place) % len(loads) for place, matrix in enumerate(shared)})
            turn += len(shared)
    if strategy == "lpt":
        even_out(owners[-EVENED_CHUNKS:], costs, sizes, loads)
    assigned: Program = {rank: [] for rank in range(len(loads))}
    for op, owner_of in zip(chunks, owners, strict=True):
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
