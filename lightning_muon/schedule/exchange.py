"""Even out the loads of ranks by exchanging matrices within chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Chunks in which owners may change. In earlier ones later chunks have evened the loads out already, and every exchange
# makes the ranks of that chunk finish less at one time.
EVENED_CHUNKS = 4
# Comparisons of two matrices, about half a second: plans for thousands of ranks stay quick.
MOST_COMPARISONS = 1_000_000


class _Exchange(NamedTuple):
    """Give ``matrix`` of a chunk to ``rank`` and take ``other`` (-1: nothing) for it; ordered by what is best."""

    larger_load: int
    chunk: int
    matrix: int
    rank: int
    other: int


def even_out(
    owners: Sequence[dict[int, int]], costs: Sequence[int], sizes: Sequence[int], loads: list[tuple[int, int]]
) -> None:
    """Relieve the busiest rank by the exchange that helps most, again and again, until none does.

    A matrix goes to another rank, alone or in exchange for a cheaper matrix of the same chunk; after it both ranks have
    less to do than the busiest had. The order is fixed, so all ranks that plan come to the same owners.

    Args:
        owners: For each chunk its matrices and their owners. Updated in place.
        costs: FLOPs of every matrix.
        sizes: Bytes of every matrix.
        loads: FLOPs and bytes of every rank. Updated in place.
    """
    compared = 0
    while compared < MOST_COMPARISONS:
        busiest = max(range(len(loads)), key=lambda rank: (loads[rank][0], -rank))
        best: _Exchange | None = None
        for number, chunk in enumerate(owners):
            for matrix in [matrix for matrix, owner in chunk.items() if owner == busiest]:
                compared += len(chunk)
                best = min(filter(None, (best, _best_exchange(number, chunk, matrix, costs, loads))), default=None)
        if best is None:
            return
        moves = [(best.matrix, busiest, best.rank), (best.other, best.rank, busiest)]
        for matrix, source, target in moves[: 1 if best.other < 0 else 2]:
            loads[source] = (loads[source][0] - costs[matrix], loads[source][1] - sizes[matrix])
            loads[target] = (loads[target][0] + costs[matrix], loads[target][1] + sizes[matrix])
            owners[best.chunk][matrix] = target


def _best_exchange(
    number: int, chunk: dict[int, int], matrix: int, costs: Sequence[int], loads: Sequence[tuple[int, int]]
) -> _Exchange | None:
    """What takes most load from the owner of ``matrix`` without making another rank as busy."""
    load = loads[chunk[matrix]][0]
    idlest = min(range(len(loads)), key=lambda rank: (loads[rank][0], rank))
    partners = [(idlest, -1, costs[matrix])]
    partners += [(rank, other, costs[matrix] - costs[other]) for other, rank in chunk.items()]
    return min(
        (
            _Exchange(max(load - relief, loads[rank][0] + relief), number, matrix, rank, other)
            for rank, other, relief in partners
            if 0 < relief < load - loads[rank][0]
        ),
        default=None,
    )
