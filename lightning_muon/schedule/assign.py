"""Who computes what: longest-processing-time-first assignment."""

from __future__ import annotations

from collections.abc import Sequence


def longest_first(
    costs: Sequence[int], sizes: Sequence[int], loads: list[tuple[int, int]], *, taken: Sequence[int]
) -> dict[int, int]:
    """Give each job, dearest first, to the rank with the least load so far; a rank is within 4/3 of the optimum.

    Args:
        costs: FLOPs of every job.
        sizes: Bytes of every job; they break ties between equal loads.
        loads: ``(FLOPs, bytes)`` of every rank. Updated in place, so that the next chunk evens this one out.
        taken: Indices of the jobs to assign.

    Returns:
        Job index -> rank, the same on every rank.

    Source: Graham 1969, Bounds on multiprocessing timing anomalies.
    """
    owners: dict[int, int] = {}
    for job in sorted(taken, key=lambda index: (-costs[index], -sizes[index], index)):
        rank = min(range(len(loads)), key=lambda candidate: (*loads[candidate], candidate))
        owners[job] = rank
        load_flops, load_bytes = loads[rank]
        loads[rank] = (load_flops + costs[job], load_bytes + sizes[job])
    return owners
