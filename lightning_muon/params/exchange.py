"""Which matrices travel among which ranks, and the program of a step for them, from names and shapes alone.

The optimizer calls :func:`plan_exchanges` with what it reads off its tensors, ``lightning-muon plan`` with the shapes
of a model. Nothing here needs a tensor or a process group.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product

from torch import Tensor

from lightning_muon.config import ExchangeOptions
from lightning_muon.math.newton_schulz import newton_schulz_flops
from lightning_muon.params.layout import AxisPlacement, held_boxes, sharded_axes
from lightning_muon.params.logical import Box, LogicalMatrix, Shards, cut_of, logical_matrices, tile
from lightning_muon.params.routing import Route
from lightning_muon.schedule.estimates import sharing_pays
from lightning_muon.schedule.muon import MatrixSpec, MuonPlan, plan_step

Coordinate = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ExchangeOptions):
    """What decides over owners, buckets and order.

    Attributes:
        itemsize: Bytes of an element on the wire.
        device_type: Where Newton-Schulz runs.
    """

    itemsize: int
    device_type: str


@dataclass(frozen=True, eq=False)
class MeshRanks:
    """The ranks of a device mesh, and the one that the plan is made for. Each mesh is one object."""

    shape: tuple[int, ...]  # Sizes of the axes; empty for tensors of one process alone.
    coordinates: tuple[Coordinate, ...]  # Mesh coordinate of each rank, in the order of the global ranks.
    rank: int = 0  # Index of the planning rank in `coordinates`.

    @classmethod
    def of_shape(cls, shape: Sequence[int], rank: int = 0) -> MeshRanks:
        """A mesh whose ranks are numbered as ``init_device_mesh`` does, the last axis fastest."""
        return cls(tuple(shape), tuple(product(*map(range, shape))), rank)

    def along(self, axes: Sequence[int]) -> tuple[Coordinate, ...]:
        """Coordinates of the ranks that differ from the planning one along ``axes`` only, in their order."""
        own = self.coordinates[self.rank]
        others = [axis for axis in range(len(self.shape)) if axis not in axes]
        return tuple(each for each in self.coordinates if all(each[axis] == own[axis] for axis in others))


@dataclass(frozen=True, eq=False)
class ParameterToPlan:
    """What the plan must know of a trainable parameter."""

    route: Route
    shape: tuple[int, ...]
    mesh: MeshRanks
    placements: tuple[AxisPlacement, ...]
    ns_steps: int


@dataclass(frozen=True, eq=False)
class ExchangeRanks:
    """The ranks among which some matrices travel."""

    mesh: MeshRanks  # Mesh of the parameters.
    mesh_axes: tuple[int, ...]  # Axes of `mesh` over which matrices travel.
    sharded: tuple[int, ...]  # Those of them that shard matrices; the others replicate them.
    coordinates: tuple[Coordinate, ...]  # Of the ranks that differ from the planning one along `mesh_axes`.
    rank: int  # Index of the planning rank in `coordinates`.
    replica_of: tuple[int, ...]  # Replica of each of these ranks, numbered from 0.

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.coordinates)

    @property
    def spans_replicas(self) -> bool:
        """Whether one owner serves several replicas."""
        return len(set(self.replica_of)) > 1


def exchange_ranks(mesh: MeshRanks, sharded: tuple[int, ...], is_shared: bool) -> ExchangeRanks:
    """The ranks of matrices that are sharded over the axes ``sharded`` of ``mesh`` and replicated over the others.

    Args:
        mesh: Of the parameters.
        sharded: Indices of axes of more than one rank.
        is_shared: One owner for all replicas, on any rank of the mesh; otherwise one in each replica.
    """
    mesh_axes = tuple(range(len(mesh.shape))) if is_shared else sharded
    coordinates = mesh.along(mesh_axes)
    replicas: dict[Coordinate, int] = {}
    replica_of = tuple(
        replicas.setdefault(tuple(index for axis, index in enumerate(each) if axis not in sharded), len(replicas))
        for each in coordinates
    )
    rank = coordinates.index(mesh.coordinates[mesh.rank])
    return ExchangeRanks(mesh, mesh_axes, sharded, coordinates, rank, replica_of)


@dataclass(frozen=True, eq=False)
class Pieces:
    """The part of a matrix that each rank of the exchange group holds; matrices that lie alike share one object."""

    box: Box  # The matrix.
    shards: Shards  # Of its parameter.
    held: tuple[int, ...]  # Number of elements on each rank.
    # The planning rank's part in its local tensor; `None` if that is all of it, or nothing.
    slices: tuple[slice, ...] | None

    @cached_property
    def by_rank(self) -> Mapping[int, Box]:
        """Rank -> its part of the parameter, by rank; ranks without elements are left out."""
        return self.shards.pieces(self.box)

    @cached_property
    def _cut(self) -> tuple[int, tuple[int, ...]] | None:
        return cut_of(self.by_rank.values())

    @cached_property
    def _parts(self) -> list[Box]:
        """The different parts, in the order in which they start."""
        return sorted(set(self.by_rank.values()), key=lambda part: part.start)

    def views(self, whole: Tensor, box: Box) -> dict[tuple[int, ...], Tensor]:
        """The part of every rank in a tensor that holds just ``box``, the matrix; by the start of its box."""
        if self._cut is None:
            parts = [whole[part.slices_in(box)] for part in self._parts]
        else:
            dim, sizes = self._cut
            parts = whole.split(sizes, dim)  # Hundreds of views in the time of a few slices.
        return dict(zip((part.start for part in self._parts), parts, strict=True))


@dataclass(frozen=True, eq=False)
class PlacedMatrix:
    """A matrix, and where it lies."""

    parameter: int  # Index of its parameter among those of `plan_exchanges`.
    matrix: LogicalMatrix  # Its box in the parameter.
    pieces: Pieces  # Where it lies.
    flops: int  # Of Newton-Schulz.


@dataclass(frozen=True, eq=False)
class PlannedExchange:
    """The matrices that travel among the same ranks."""

    ranks: ExchangeRanks  # Among which they travel.
    matrices: tuple[PlacedMatrix, ...]  # In the order of the parameters.
    specs: tuple[MatrixSpec, ...]  # What the planner was told of each matrix.
    plan: MuonPlan  # Owners and buckets of the matrices, and the program of a step.


def plan_exchanges(parameters: Sequence[ParameterToPlan], options: PlanOptions) -> list[PlannedExchange]:
    """Owners, buckets and program of every exchange group, those that stay within a replica first.

    Every rank of the meshes comes to the same owners and buckets. The program is that of the planning rank.

    Args:
        parameters: All trainable ones, in the order of the forward pass, the same on all ranks of their mesh.
        options: Of the plan.

    Raises:
        ValueError: If the shards of a matrix do not make up the whole.
    """
    loads = Loads()
    planned: list[PlannedExchange] = []
    for number, (ranks, matrices) in enumerate(group_matrices(parameters, options)):
        specs = matrix_specs(matrices)
        plan = plan_step(
            specs,
            num_ranks=ranks.size,
            itemsize=options.itemsize,
            chunk_bytes=options.chunk_bytes,
            strategy=options.assignment,
            replica_of=ranks.replica_of,
            loads=loads.of(ranks),
            key_prefix=f"{number}.",
            ranks=(ranks.rank,),
        )
        loads.add(ranks, specs, plan, options.itemsize)
        planned.append(PlannedExchange(ranks, tuple(matrices), specs, plan))
    return planned


def group_matrices(
    parameters: Sequence[ParameterToPlan], options: PlanOptions
) -> list[tuple[ExchangeRanks, list[PlacedMatrix]]]:
    """The matrices of these parameters by the ranks among which they travel; arguments as :func:`plan_exchanges`."""
    found = [
        (
            each,
            sharded_axes(each.placements, each.mesh.shape, each.route.name),
            logical_matrices(each.shape, each.route),
        )
        for each in parameters
    ]
    num_alike: Counter[tuple[MeshRanks, tuple[int, ...]]] = Counter()
    for each, sharded, matrices in found:
        num_alike[each.mesh, sharded] += len(matrices)
    groups: dict[ExchangeRanks, list[PlacedMatrix]] = {}
    # Each group of ranks is one object, and a large model has few different shapes.
    ranks_of, shards_of = cache(exchange_ranks), cache(_ParameterShards)
    for index, (each, sharded, matrices) in enumerate(found):
        # Matrices of one shape share the answer, for example the experts of a stack.
        answers: dict[tuple[int, int], tuple[list[PlacedMatrix], _ParameterShards, int]] = {}
        for matrix in matrices:
            sides = matrix.rows, matrix.cols
            if sides not in answers:
                flops = newton_schulz_flops(*sides, each.ns_steps)
                is_shared = _is_shared(
                    each.mesh,
                    sharded,
                    options,
                    flops=flops,
                    wire_bytes=matrix.box.numel * options.itemsize,
                    num_matrices=num_alike[each.mesh, sharded],
                )
                ranks = ranks_of(each.mesh, sharded, is_shared)
                answers[sides] = groups.setdefault(ranks, []), shards_of(each.shape, each.placements, ranks), flops
            placed, shards, flops = answers[sides]
            placed.append(PlacedMatrix(index, matrix, shards.pieces(matrix), flops))
    return sorted(groups.items(), key=lambda item: item[0].spans_replicas)


def _is_shared(
    mesh: MeshRanks,
    sharded: tuple[int, ...],
    options: PlanOptions,
    *,
    flops: int,
    wire_bytes: int,
    num_matrices: int,
) -> bool:
    """Whether one owner serves all replicas; ``num_matrices`` are sharded over the same axes of the mesh."""
    if options.dedupe != "auto":
        return options.dedupe == "always"
    replica_ranks = math.prod(mesh.shape[axis] for axis in sharded)
    return sharing_pays(
        flops,
        wire_bytes,
        device_type=options.device_type,
        num_matrices=num_matrices,
        num_replicas=math.prod(mesh.shape) // replica_ranks,
        replica_ranks=replica_ranks,
    )


class _ParameterShards:
    """How the parameters of one shape and placement lie on the ranks of an exchange group."""

    def __init__(self, shape: tuple[int, ...], placements: tuple[AxisPlacement, ...], ranks: ExchangeRanks) -> None:
        self._ranks = ranks
        self._shards = Shards(held_boxes(shape, ranks.mesh.shape, placements, ranks.coordinates))
        self._known: dict[Box, Pieces] = {}
        self._held: dict[tuple[object, ...], tuple[int, ...]] = {}

    def pieces(self, matrix: LogicalMatrix) -> Pieces:
        """Where a matrix of such a parameter lies."""
        box = matrix.box
        if box not in self._known:
            pattern = self._shards.pattern(box)
            if pattern not in self._held:
                self._held[pattern] = self._count(matrix)
            outer = self._shards.boxes[self._ranks.rank]
            mine = outer.intersect(box)
            slices = None if mine == outer or not mine.numel else mine.slices_in(outer)
            self._known[box] = Pieces(box, self._shards, self._held[pattern], slices)
        return self._known[box]

    def _count(self, matrix: LogicalMatrix) -> tuple[int, ...]:
        """Elements of the matrix on each rank."""
        by_rank, replica_of = self._shards.pieces(matrix.box), self._ranks.replica_of
        own = replica_of[self._ranks.rank]
        replica = [piece for rank, piece in by_rank.items() if replica_of[rank] == own]
        if not tile(replica, matrix.box):
            raise ValueError(
                f"the shards of {matrix.name} are no contiguous parts that make up the whole: {replica[:4]}; "
                "ParallelMuon does not take this order of sharding"
            )
        return tuple(by_rank[rank].numel if rank in by_rank else 0 for rank in range(self._ranks.size))


def matrix_specs(matrices: Sequence[PlacedMatrix]) -> tuple[MatrixSpec, ...]:
    """What the planner must know of each matrix."""
    # Equal tuples are one object: the planner is fast for those.
    shared: dict[tuple[int, ...], tuple[int, ...]] = {}
    held = {pieces: shared.setdefault(pieces.held, pieces.held) for pieces in {each.pieces: None for each in matrices}}
    return tuple(
        MatrixSpec(
            name=each.matrix.name,
            numel=each.matrix.rows * each.matrix.cols,
            flops=each.flops,
            held=held[each.pieces],
            rows=each.matrix.rows,
            cols=each.matrix.cols,
        )
        for each in matrices
    )


class Loads:
    """FLOPs and bytes that each rank of a mesh owns so far, so that later matrices even out earlier ones."""

    def __init__(self) -> None:
        self._owned: list[tuple[ExchangeRanks, dict[Coordinate, tuple[int, int]]]] = []

    def of(self, ranks: ExchangeRanks) -> list[tuple[int, int]]:
        """``(FLOPs, bytes)`` of every rank of an exchange group; the same in each of its replicas.

        Replicas that repeat the work must have the same owners, and so the same batches: on CUDA a matrix in a batch
        may get other bits than alone. Where their loads differ the largest one counts.
        """
        return [
            (sum(flops for flops, _ in found), sum(size for _, size in found))
            for found in (self._at(ranks, coordinate) for coordinate in ranks.coordinates)
        ]

    def add(self, ranks: ExchangeRanks, specs: Sequence[MatrixSpec], plan: MuonPlan, itemsize: int) -> None:
        """Count the matrices of an exchange group; where it is one replica of several, the others do the same."""
        loads = [(0, 0)] * ranks.size
        for spec, owners in zip(specs, plan.owners, strict=True):
            for owner in owners:
                flops, size = loads[owner]
                loads[owner] = (flops + spec.flops, size + spec.numel * itemsize)
        places = [tuple(coordinate[axis] for axis in ranks.mesh_axes) for coordinate in ranks.coordinates]
        self._owned.append((ranks, dict(zip(places, loads, strict=True))))

    def _at(self, ranks: ExchangeRanks, coordinate: Coordinate) -> list[tuple[int, int]]:
        """The load of each earlier exchange group at this coordinate."""
        return [
            max(
                load
                for place, load in loads.items()
                if all(
                    coordinate[axis] == index
                    for axis, index in zip(earlier.mesh_axes, place, strict=True)
                    if axis in ranks.mesh_axes
                )
            )
            for earlier, loads in self._owned
            if earlier.mesh is ranks.mesh
        ]
