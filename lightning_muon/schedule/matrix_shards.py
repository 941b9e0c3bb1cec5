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
    replica_numel: dict[int, int]  # Replica -> elements of its ranks together.
    total: int  # Elements of all ranks together.
    sole_holder: int | None  # The rank that holds all elements while no other has any; rank 0 if there are no elements.


@dataclass(frozen=True, kw_only=True)
class ShardedMatrices:
    """Where the matrices lie."""

    specs: tuple[MatrixSpec, ...]  # The matrices.
    replica_of: tuple[int, ...]  # Replica of each rank of the exchange group.
    shards: tuple[MatrixShards, ...]  # How each matrix lies on the ranks.

    @property
    def num_ranks(self) -> int:
        """Size of the exchange group."""
        return len(self.replica_of)

    def sole_holders(self) -> list[int | None]:
        """:attr:`MatrixShards.sole_holder` of every matrix."""
        return [each.sole_holder for each in self.shards]


def sharded_matrices(specs: Sequence[MatrixSpec], replica_of: Sequence[int]) -> ShardedMatrices:
    """Find out how the matrices lie on the ranks, and check that each replica has all of each matrix.

    A matrix may also lie whole on one rank and nowhere else. Takes the time of reading each different ``held`` once.

    Raises:
        ValueError: ``held`` has another length than ``replica_of``, or the ranks of a replica do not hold all.
    """
    num_replicas = len(set(replica_of))
    by_id: dict[int, MatrixShards] = {}
    by_value: dict[tuple[int, ...], MatrixShards] = {}
    checked: set[tuple[MatrixShards, int]] = set()
    shards: list[MatrixShards] = []
    for spec in specs:
        found = by_id.get(id(spec.held))
        if found is None:
            found = by_value.get(spec.held) or _matrix_shards(spec, replica_of)
            by_id[id(spec.held)] = by_value[spec.held] = found
        if (found, spec.numel) not in checked:
            _require_whole(spec, found, num_replicas)
            checked.add((found, spec.numel))
        shards.append(found)
    return ShardedMatrices(specs=tuple(specs), replica_of=tuple(replica_of), shards=tuple(shards))


def _matrix_shards(spec: MatrixSpec, replica_of: Sequence[int]) -> MatrixShards:
    if len(spec.held) != len(replica_of):
        raise ValueError(
            f"{spec.name} says what {len(spec.held)} ranks hold, but the exchange group has {len(replica_of)} ranks; "
            "give one number of elements per rank"
        )
    by_replica: dict[int, list[tuple[int, int]]] = {}
    for rank, count in enumerate(spec.held):
        if count:
            by_replica.setdefault(replica_of[rank], []).append((rank, count))
    numel = {replica: sum(count for _, count in holders) for replica, holders in by_replica.items()}
    filled = [rank for rank, count in enumerate(spec.held) if count]
    return MatrixShards(
        held=spec.held,
        by_replica=by_replica,
        replica_numel=numel,
        total=sum(numel.values()),
        sole_holder=0 if not filled else filled[0] if len(filled) == 1 else None,
    )


def _require_whole(spec: MatrixSpec, shards: MatrixShards, num_replicas: int) -> None:
    numels = shards.replica_numel
    is_everywhere = len(numels) == num_replicas or shards.sole_holder is not None
    if is_everywhere and all(numel == spec.numel for numel in numels.values()):
        return
    raise ValueError(
        f"the ranks of each replica must hold all {spec.numel} elements of {spec.name} together, but they hold "
        f"{numels} (replica: elements) of {num_replicas} replicas; give in replica_of the replica of each rank (for "
        "replicated parameters each rank is a replica of its own)"
    )
