"""What the planner knows of matrices: their sizes, and how many elements each rank holds of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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


@dataclass(frozen=True, kw_only=True)
class MatrixSpec:
    """What the planner must know of one matrix."""

    name: str  # Qualified name, for people.
    rows: int
    cols: int
    flops: int  # Cost of Newton-Schulz.
    shards: MatrixShards  # How it lies on the ranks of its exchange group.

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.cols
