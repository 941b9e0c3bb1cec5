"""What the planner knows of matrices: their sizes, and how many elements each rank holds of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MatrixSpec:
    """What the planner must know of one matrix."""

    name: str  # Qualified name, for people and for the fingerprint.
    numel: int  # Number of elements.
    flops: int  # Cost of Newton-Schulz.
    # Number of elements on each rank of the exchange group. The ranks of one replica hold `numel` together. Share one
    # tuple among matrices of one shape: planning for thousands of ranks is then fast.
    held: tuple[int, ...]
    rows: int = 0  # For reports.
    cols: int = 0  # For reports.


@dataclass(frozen=True, eq=False, kw_only=True)
class MatrixShards:
    """One way in which matrices lie on the ranks; matrices that lie alike share one object."""

    held: tuple[int, ...]  # Number of elements on each rank.
    by_replica: dict[int, list[tuple[int, int]]]  # Replica -> its ranks with elements, and how many each has.
    replica_numel: dict[int, int]  # Replica -> elements of its ranks together, if it has any.
    total: int  # Elements of all ranks together.
    sole_holder: int | None  # The rank that holds all elements while no other has any; rank 0 if there are no elements.


@dataclass(frozen=True, kw_only=True)
class ShardedMatrices:
    """Where the matrices of an exchange group lie."""

    specs: tuple[MatrixSpec, ...]  # In the order of the forward pass.
    # Replica of each rank. Sharded over all ranks: all 0. Replicated: each rank its own. A (replicate, shard) grid: the
    # index along the replicate axis.
    replica_of: tuple[int, ...]
    shards: tuple[MatrixShards, ...]  # How each matrix lies on the ranks.

    @property
    def num_ranks(self) -> int:
        """Size of the exchange group."""
        return len(self.replica_of)


def sharded_matrices(specs: Sequence[MatrixSpec], replica_of: Sequence[int]) -> ShardedMatrices:
    """Find out how the matrices lie on the ranks, and check that each replica, or else one rank, has all of each."""
    # By identity, since comparing tuples of thousands of ranks for each of thousands of matrices takes long.
    known: dict[int, MatrixShards] = {}
    num_replicas = len(set(replica_of))
    for spec in specs:
        shards = known.setdefault(id(spec.held), known.get(id(spec.held)) or _matrix_shards(spec, replica_of))
        numels = shards.replica_numel
        is_everywhere = len(numels) == num_replicas or shards.sole_holder is not None
        if not is_everywhere or any(numel != spec.numel for numel in numels.values()):
            raise ValueError(
                f"the ranks of each replica must hold all {spec.numel} elements of {spec.name} together, but they hold "
                f"{numels} (replica: elements) of {num_replicas} replicas; give in replica_of the replica of each rank "
                "(for replicated parameters each rank is a replica of its own)"
            )
    return ShardedMatrices(
        specs=tuple(specs), replica_of=tuple(replica_of), shards=tuple(known[id(spec.held)] for spec in specs)
    )


def _matrix_shards(spec: MatrixSpec, replica_of: Sequence[int]) -> MatrixShards:
    if len(spec.held) != len(replica_of):
        raise ValueError(
            f"{spec.name} says what {len(spec.held)} ranks hold, but the exchange group has {len(replica_of)} ranks"
        )
    by_replica: dict[int, list[tuple[int, int]]] = {}
    for rank, count in enumerate(spec.held):
        if count:
            by_replica.setdefault(replica_of[rank], []).append((rank, count))
    numel = {replica: sum(count for _, count in holders) for replica, holders in by_replica.items()}
    filled = [rank for holders in by_replica.values() for rank, _ in holders]
    return MatrixShards(
        held=spec.held,
        by_replica=by_replica,
        replica_numel=numel,
        total=sum(numel.values()),
        sole_holder=0 if not filled else filled[0] if len(filled) == 1 else None,
    )
