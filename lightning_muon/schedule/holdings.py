"""What the planner knows of matrices: their sizes and which rank holds how much of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MatrixSpec:
    """What the planner must know of one matrix.

    Attributes:
        name: Qualified name, for people and for the fingerprint.
        numel: Number of elements.
        flops: Cost of Newton-Schulz.
        held: Number of elements on each rank of the exchange group. The ranks of one replica hold ``numel`` together.
            Share one tuple among matrices of one shape: planning for thousands of ranks is then fast.
        rows: For reports.
        cols: For reports.
    """

    name: str
    numel: int
    flops: int
    held: tuple[int, ...]
    rows: int = 0
    cols: int = 0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way in which matrices lie on the ranks: replica -> its ranks with elements, and how many each has."""

    held: tuple[int, ...]
    by_replica: dict[int, list[tuple[int, int]]]
    replica_numel: dict[int, int]
    total: int

    @property
    def sole_holder(self) -> int | None:
        """The rank that holds all elements while no other has any; rank 0 if there are no elements."""
        if not self.by_replica:
            return 0
        if len(self.by_replica) > 1:
            return None
        (holders,) = self.by_replica.values()
        return holders[0][0] if len(holders) == 1 else None


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """Where the matrices lie.

    Attributes:
        specs: The matrices.
        replica_of: Replica of each rank of the exchange group.
        layouts: The different layouts.
        layout_of: Index into ``layouts`` of each matrix.
    """

    specs: tuple[MatrixSpec, ...]
    replica_of: tuple[int, ...]
    layouts: tuple[Layout, ...]
    layout_of: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """Size of the exchange group."""
        return len(self.replica_of)

    def layout(self, matrix: int) -> Layout:
        """How a matrix lies on the ranks."""
        return self.layouts[self.layout_of[matrix]]

    def sole_holders(self) -> list[int | None]:
        """:attr:`Layout.sole_holder` of every matrix."""
        by_layout = [layout.sole_holder for layout in self.layouts]
        return [by_layout[index] for index in self.layout_of]


def holdings(specs: Sequence[MatrixSpec], replica_of: Sequence[int]) -> Holdings:
    """Sort the matrices by the way they lie on the ranks, and check that each replica has all of each matrix.

    A matrix may also lie whole on one rank and nowhere else.

    Takes the time of reading each different ``held`` once.

    Raises:
        ValueError: ``held`` has another length than ``replica_of``, or the ranks of a replica do not hold all.
    """
    num_replicas = len(set(replica_of))
    layouts: list[Layout] = []
    by_id: dict[int, int] = {}
    by_value: dict[tuple[int, ...], int] = {}
    layout_of: list[int] = []
    checked: set[tuple[int, int]] = set()
    for spec in specs:
        index = by_id.get(id(spec.held))
        if index is None:
            index = by_value.setdefault(spec.held, len(layouts))
            if index == len(layouts):
                layouts.append(_layout(spec, replica_of))
            by_id[id(spec.held)] = index
        if (index, spec.numel) not in checked:
            _require_whole(spec, layouts[index], num_replicas)
            checked.add((index, spec.numel))
        layout_of.append(index)
    return Holdings(
        specs=tuple(specs), replica_of=tuple(replica_of), layouts=tuple(layouts), layout_of=tuple(layout_of)
    )


def _layout(spec: MatrixSpec, replica_of: Sequence[int]) -> Layout:
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
    return Layout(held=spec.held, by_replica=by_replica, replica_numel=numel, total=sum(numel.values()))


def _require_whole(spec: MatrixSpec, layout: Layout, num_replicas: int) -> None:
    numels = layout.replica_numel
    is_everywhere = len(numels) == num_replicas or layout.sole_holder is not None
    if is_everywhere and all(numel == spec.numel for numel in numels.values()):
        return
    raise ValueError(
        f"the ranks of each replica must hold all {spec.numel} elements of {spec.name} together, but they hold "
        f"{numels} (replica: elements) of {num_replicas} replicas; give in replica_of the replica of each rank (for "
        "replicated parameters each rank is a replica of its own)"
    )
