"""Plans which matrices are exchanged among which ranks, and the program of a step, from names and shapes alone.

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
from lightning_muon.math.newton_schulz import Arithmetic, NewtonSchulzOptions
from lightning_muon.params.layout import AxisPlacement, held_boxes, sharded_axes
from lightning_muon.params.logical import Box, LogicalMatrix, ShardBoxes, cut_of, logical_matrices, tile
from lightning_muon.params.routing import Route
from lightning_muon.schedule.assign import MatrixShards, MatrixSpec, sharing_pays
from lightning_muon.schedule.muon import MuonPlan, plan_step

Coordinate = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ExchangeOptions):
    """The options that decide about owners, buckets and order."""

    itemsize: int  # Bytes of an element on the wire.
    arithmetic: Arithmetic  # Arithmetic of Newton-Schulz.


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


@dataclass(frozen=True, eq=False)
class ParameterToPlan:
    """The facts about a trainable parameter that the plan needs."""

    route: Route
    shape: tuple[int, ...]
    mesh: MeshRanks
    placements: tuple[AxisPlacement, ...]
    newton_schulz: NewtonSchulzOptions


@dataclass(frozen=True, eq=False)
class ExchangeRanks:
    """The ranks among which some matrices are exchanged."""

    mesh: MeshRanks  # Mesh of the parameters.
    mesh_axes: tuple[int, ...]  # Axes of `mesh` over which matrices are exchanged.
    sharded: tuple[int, ...]  # Those of them that shard matrices; the others replicate them.
    coordinates: tuple[Coordinate, ...]  # Those of the ranks that differ from the planning one along `mesh_axes`.
    rank: int  # Index of the planning rank in `coordinates`.
    replica_of: tuple[int, ...]  # Replica of each of these ranks, numbered from 0.

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.coordinates)


def exchange_ranks(mesh: MeshRanks, sharded: tuple[int, ...], is_shared: bool) -> ExchangeRanks:
    """The ranks of matrices that are sharded over the axes ``sharded`` of ``mesh``, replicated over the others.

    With ``is_shared`` one owner serves all replicas, on any rank of the mesh; otherwise each replica has its own.
    """
    own = mesh.coordinates[mesh.rank]
    mesh_axes = tuple(range(len(mesh.shape))) if is_shared else sharded
    fixed = [axis for axis in range(len(mesh.shape)) if axis not in mesh_axes]
    coordinates = tuple(each for each in mesh.coordinates if all(each[axis] == own[axis] for axis in fixed))
    replicas: dict[Coordinate, int] = {}
    replica_of = tuple(
        replicas.setdefault(tuple(index for axis, index in enumerate(each) if axis not in sharded), len(replicas))
        for each in coordinates
    )
    return ExchangeRanks(mesh, mesh_axes, sharded, coordinates, coordinates.index(own), replica_of)


@dataclass(frozen=True, eq=False)
class Pieces:
    """The part of a matrix that each rank of the exchange group holds; matrices that lie alike share one object."""

    box: Box  # The matrix.
    shards: ShardBoxes  # Shards of its parameter.
    on_ranks: MatrixShards  # How many of its elements each rank holds.
    # The planning rank's part in its local tensor; `None` if that is all of it, or nothing.
    slices: tuple[slice, ...] | None

    @cached_property
    def by_rank(self) -> Mapping[int, Box]:
        """Rank -> its part of the parameter, by rank; ranks without elements are left out."""
        return self.shards.pieces(self.box)

    @cached_property
    def _parts(self) -> tuple[list[Box], tuple[int, tuple[int, ...]] | None]:
        """The different parts, in order of their starts, and the ``Tensor.split`` that makes them, if there is one."""
        parts = sorted(set(self.by_rank.values()), key=lambda part: part.start)
        return parts, cut_of(parts)

    def local_view(self, local: Tensor) -> Tensor:
        """The planning rank's part, which must have elements, in its local tensor."""
        return local if self.slices is None else local[self.slices]

    def views(self, whole: Tensor) -> dict[Coordinate, Tensor]:
        """The part of every rank in a tensor that holds just the matrix; by the start of its box."""
        parts, cut = self._parts
        if cut is None:
            views = [whole[part.slices_in(self.box)] for part in parts]
        else:
            dim, sizes = cut
            views = whole.split(sizes, dim)  # Makes hundreds of views in the time of a few slices.
        return dict(zip((part.start for part in parts), views, strict=True))


@dataclass(frozen=True, eq=False)
class PlacedMatrix:
    """A matrix, and where it lies."""

    parameter: int  # Index of its parameter among those of `plan_exchanges`.
    matrix: LogicalMatrix  # Its box in the parameter.
    pieces: Pieces  # Where it lies.
    spec: MatrixSpec  # Its description for the planner.


@dataclass(frozen=True, eq=False)
class PlannedExchange:
    """The matrices that are exchanged among the same ranks."""

    ranks: ExchangeRanks  # The ranks of the exchange.
    matrices: tuple[PlacedMatrix, ...]  # In the order of the parameters.
    plan: MuonPlan  # Owners and buckets of the matrices, and the program of a step.


def plan_exchanges(parameters: Sequence[ParameterToPlan], options: PlanOptions) -> list[PlannedExchange]:
    """Plan owners, buckets and program of every exchange group, those that stay within a replica first.

    Every rank of the meshes gets the same owners and buckets; the program is that of the planning rank.
    ``parameters`` are all trainable ones in the order of the forward pass, the same on all ranks of their mesh.
    """
    planned: list[PlannedExchange] = []
    for number, (ranks, matrices) in enumerate(group_matrices(parameters, options)):
        plan = plan_step(
            [each.spec for each in matrices],
            itemsize=options.itemsize,
            bucket_bytes=options.bucket_bytes,
            strategy=options.assignment,
            loads=loads_so_far(ranks, planned, options.itemsize),
            key_prefix=f"{number}.",
            ranks=(ranks.rank,),
        )
        planned.append(PlannedExchange(ranks, tuple(matrices), plan))
    return planned


def group_matrices(
    parameters: Sequence[ParameterToPlan], options: PlanOptions
) -> list[tuple[ExchangeRanks, list[PlacedMatrix]]]:
    """Group matrices by the ranks among which they are exchanged; arguments as :func:`plan_exchanges`."""
    num_alike: Counter[tuple[MeshRanks, tuple[int, ...]]] = Counter()
    found: list[tuple[ParameterToPlan, tuple[int, ...], tuple[LogicalMatrix, ...]]] = []
    for each in parameters:
        sharded = sharded_axes(each.placements, each.mesh.shape, each.route.name)
        found.append((each, sharded, logical_matrices(each.shape, each.route)))
        num_alike[each.mesh, sharded] += len(found[-1][-1])
    groups: dict[ExchangeRanks, list[PlacedMatrix]] = {}
    # Each group of ranks is one object, and a large model has few different shapes.
    ranks_of, shards_of = cache(exchange_ranks), cache(_ParameterShards)

    @cache
    def flops_and_ranks(
        mesh: MeshRanks, sharded: tuple[int, ...], rows: int, cols: int, newton_schulz: NewtonSchulzOptions
    ) -> tuple[int, ExchangeRanks]:
        flops = newton_schulz.flops(rows, cols, options.arithmetic)
        is_shared = options.dedupe == "always"
        if options.dedupe == "auto":
            replica_ranks = math.prod(mesh.shape[axis] for axis in sharded)
            is_shared = sharing_pays(
                flops,
                rows * cols * options.itemsize,
                device_type=options.arithmetic.device_type,
                num_matrices=num_alike[mesh, sharded],
                num_replicas=math.prod(mesh.shape) // replica_ranks,
                replica_ranks=replica_ranks,
            )
        return flops, ranks_of(mesh, sharded, is_shared)

    for index, (each, sharded, matrices) in enumerate(found):
        for matrix in matrices:
            flops, ranks = flops_and_ranks(each.mesh, sharded, matrix.rows, matrix.cols, each.newton_schulz)
            shards = shards_of(each.shape, each.placements, ranks)
            pieces = shards.pieces(matrix)
            spec = MatrixSpec(
                name=matrix.name,
                rows=matrix.rows,
                cols=matrix.cols,
                flops=flops,
                shards=pieces.on_ranks,
            )
            groups.setdefault(ranks, []).append(PlacedMatrix(index, matrix, pieces, spec))
    return sorted(groups.items(), key=lambda item: any(item[0].replica_of))


class _ParameterShards:
    """How the parameters of one shape and placement lie on the ranks of an exchange group."""

    def __init__(self, shape: tuple[int, ...], placements: tuple[AxisPlacement, ...], ranks: ExchangeRanks) -> None:
        self._ranks = ranks
        self._shards = ShardBoxes(held_boxes(shape, ranks.mesh.shape, placements, ranks.coordinates))
        self._known: dict[Box, Pieces] = {}
        self._on_ranks: dict[tuple[object, ...], MatrixShards] = {}

    def pieces(self, matrix: LogicalMatrix) -> Pieces:
        """Where a matrix of such a parameter lies."""
        box = matrix.box
        if box not in self._known:
            pattern = self._shards.pattern(box)
            if pattern not in self._on_ranks:
                self._on_ranks[pattern] = self._count(matrix)
            outer = self._shards.boxes[self._ranks.rank]
            mine = outer.intersect(box)
            slices = None if mine == outer or not mine.numel else mine.slices_in(outer)
            self._known[box] = Pieces(box, self._shards, self._on_ranks[pattern], slices)
        return self._known[box]

    def _count(self, matrix: LogicalMatrix) -> MatrixShards:
        """Elements of the matrix on each rank."""
        by_rank, replica_of = self._shards.pieces(matrix.box), self._ranks.replica_of
        own = replica_of[self._ranks.rank]
        replica = [piece for rank, piece in by_rank.items() if replica_of[rank] == own]
        if not tile(replica, matrix.box):
            raise ValueError(
                f"the shards of {matrix.name} are no contiguous parts that make up the whole: {replica[:4]}; "
                "ParallelMuon does not take this order of sharding"
            )
        held = [by_rank[rank].numel if rank in by_rank else 0 for rank in range(self._ranks.size)]
        return MatrixShards(held, replica_of)


def loads_so_far(ranks: ExchangeRanks, earlier: Sequence[PlannedExchange], itemsize: int) -> list[tuple[int, int]]:
    """``(FLOPs, bytes)`` that every rank of an exchange group owns in ``earlier`` ones; the same in each replica.

    Replicas that repeat the work must have the same owners, and so the same batches: on CUDA a matrix in a batch may
    get other bits than alone. If loads differ between replicas, the largest one counts.
    """
    totals = [(0, 0)] * ranks.size
    for each in earlier:
        if each.ranks.mesh is not ranks.mesh:
            continue
        owned = [(0, 0)] * each.ranks.size
        for placed, owners in zip(each.matrices, each.plan.owners, strict=True):
            for owner in owners:
                flops, size = owned[owner]
                owned[owner] = flops + placed.spec.flops, size + placed.spec.numel * itemsize
        # Replicas of the earlier group on other ranks of the mesh do the same as this one.
        common = [axis for axis in each.ranks.mesh_axes if axis in ranks.mesh_axes]
        largest: dict[Coordinate, tuple[int, int]] = {}
        for coordinate, load in zip(each.ranks.coordinates, owned, strict=True):
            place = tuple(coordinate[axis] for axis in common)
            largest[place] = max(load, largest.get(place, load))
        for index, coordinate in enumerate(ranks.coordinates):
            flops, size = largest[tuple(coordinate[axis] for axis in common)]
            totals[index] = totals[index][0] + flops, totals[index][1] + size
    return totals
