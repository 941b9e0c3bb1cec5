"""Tie the parameters of an optimizer to matrices, exchange groups and a plan."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.comm.agreement import gather, require_equal
from lightning_muon.comm.mesh import AxisGroup, PrivateGroups
from lightning_muon.comm.nodes import nodes_of
from lightning_muon.config import Assignment, Dedupe, Overlap, check_hyperparameters
from lightning_muon.math.newton_schulz import newton_schulz_flops
from lightning_muon.optim.homes import ExchangeHome, ExchangeHomes, Loads
from lightning_muon.optim.meshes import MeshMembers
from lightning_muon.params.layout import AxisPlacement, Layout, held_boxes, sharded_axes
from lightning_muon.params.logical import Box, LogicalMatrix, Shards, cut_of, logical_matrices, tile
from lightning_muon.params.routing import Route
from lightning_muon.schedule.dedupe import sharing_pays
from lightning_muon.schedule.muon import MatrixSpec, MuonPlan, plan_step
from lightning_muon.schedule.overlap import EarlyEstimate, RankSeconds, estimate_early, machine_of, rank_seconds
from lightning_muon.schedule.validate import check_plan

ParamGroup = dict[str, Any]
# Hyper-parameters of a param group that must be equal on all ranks.
COMPARED = (
    *("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"),
    *("betas", "adamw_eps", "algorithm"),
)


_VALUES = itemgetter(*COMPARED)


class CheckedGroups:
    """Checks hyper-parameters of param groups, which users, schedulers and loaded states change at any time."""

    def __init__(self) -> None:
        self._right: list[tuple[Any, ...]] = []

    def check(self, groups: Sequence[ParamGroup]) -> None:
        """Raise ``ValueError`` for the first value that no step can be taken with; a few microseconds per group. Local.

        Values that were right the last time are not looked at again, but for tensors, which may be filled with others.
        Those on a device are not looked at, since the host would have to wait for it.
        """
        try:
            values = list(map(_VALUES, groups))
        except KeyError:
            values = []
        for number, group in enumerate(groups):
            is_known = number < len(values) and number < len(self._right) and values[number] == self._right[number]
            if not is_known or any(isinstance(each, Tensor) and each.device.type == "cpu" for each in values[number]):
                check_group_(group)
        self._right = list(map(_VALUES, groups))

    def are_right(self, groups: Sequence[ParamGroup]) -> bool:
        """Whether :meth:`check` raises nothing; local."""
        try:
            self.check(groups)
        except Exception:  # What is no number may raise anything when it is compared.
            return False
        return True


def check_group_(group: ParamGroup) -> None:
    """Raise ``ValueError`` for a hyper-parameter that is missing or out of range.

    ``None`` becomes what it means, and lists, as some checkpoints bring them, become tuples.
    """
    missing = sorted(set(COMPARED) - group.keys())
    if missing:
        raise ValueError(f"a param group has no {', '.join(missing)}; put back what was there when it was made")
    if group["adjust_lr_fn"] is None:
        group["adjust_lr_fn"] = "original"  # What None means to torch.optim.Muon.
    for key in ("betas", "ns_coefficients"):
        if isinstance(group[key], list):
            group[key] = tuple(group[key])
    check_hyperparameters(group)


def completed_groups(saved: Sequence[ParamGroup], own: Sequence[ParamGroup], keys: Collection[str]) -> list[ParamGroup]:
    """Copies of saved param groups; those of ``keys`` that another optimizer's lack stay as they are in ``own``.

    Raises:
        ValueError: If a hyper-parameter is out of range, or a variant of AdamW that there is not.
    """
    groups = [dict(group) for group in saved]
    for group, before in zip(groups, own, strict=False):
        for key in ("amsgrad", "maximize"):
            if group.get(key):
                raise ValueError(
                    f"the state was saved with {key}={group[key]}, which is not supported; load only weights"
                )
        if "betas" in group and "eps" in group and "adamw_eps" not in group:
            group["adamw_eps"] = group.pop("eps")  # Saved by torch.optim.AdamW.
        group |= {key: before[key] for key in keys if key in before and key not in group}
        check_group_(group)
    return groups


@dataclass(frozen=True, eq=False)
class BoundParameter:
    """A parameter, its param group, its route, and where it lives."""

    tensor: torch.nn.Parameter
    group: ParamGroup
    route: Route
    layout: Layout

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return tuple(self.tensor.shape)

    @property
    def local(self) -> Tensor:
        """What the calling rank updates of it; shares memory."""
        return self.layout.local(self.tensor)

    @property
    def mesh_and_placements(self) -> tuple[DeviceMesh | None, tuple[AxisPlacement, ...]]:
        """As in :class:`~lightning_muon.params.layout.Layout`."""
        return self.layout.mesh_and_placements(self.tensor)


@dataclass(frozen=True, eq=False)
class Pieces:
    """The part of a matrix that each rank of the exchange group holds; matrices that lie alike share one object.

    Attributes:
        by_rank: Rank -> its part of the parameter, by rank; ranks without elements are left out.
        held: Number of elements on each rank.
        slices: The calling rank's part in its local tensor; ``None`` if that is all of it, or nothing.
    """

    by_rank: Mapping[int, Box]
    held: tuple[int, ...]
    slices: tuple[slice, ...] | None

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
class MatrixJob:
    """One Newton-Schulz job: a logical matrix and where it lies.

    Attributes:
        parameter: The parameter it belongs to.
        matrix: Its box in the parameter.
        pieces: Where it lies.
    """

    parameter: BoundParameter
    matrix: LogicalMatrix
    pieces: Pieces

    def local_view(self, local: Tensor) -> Tensor:
        """The calling rank's piece, which must have elements, in its local tensor: parameter, gradient or momentum."""
        slices = self.pieces.slices
        return local if slices is None else local[slices]


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What decides over owners, buckets and order; see :class:`~lightning_muon.config.MuonConfig`.

    Attributes:
        itemsize: Bytes of an element on the wire.
        device_type: Where Newton-Schulz runs.
    """

    itemsize: int
    device_type: str
    chunk_bytes: int
    assignment: Assignment
    dedupe: Dedupe
    look_ahead: int
    overlap: Overlap


@dataclass(frozen=True, eq=False)
class ExchangeGroup:
    """The jobs whose pieces lie on the same ranks, and their plan.

    Attributes:
        axes: Ranks that communicate, over a process group of this exchange group alone.
        replica_of: Replica of each of these ranks; the ranks of a replica hold the whole matrices together.
        jobs: Matrices.
        plan: Owners and buckets.
        sends_early: Whether gathers start during backward; equal on all ranks of the mesh.
        estimate: What ``overlap="auto"`` has decided by; ``None`` if nothing is gathered or the user has decided.
    """

    axes: AxisGroup
    replica_of: tuple[int, ...]
    jobs: tuple[MatrixJob, ...]
    plan: MuonPlan
    sends_early: bool
    estimate: EarlyEstimate | None

    @cached_property
    def has_single_owners(self) -> bool:
        """Whether every matrix has one owner."""
        return all(len(owners) == 1 for owners in self.plan.owners)

    @cached_property
    def has_replicas(self) -> bool:
        """Whether the ranks belong to several replicas."""
        return len(set(self.replica_of)) > 1


@dataclass(frozen=True, eq=False)
class StepPlan:
    """Everything that :class:`~lightning_muon.ParallelMuon` knows of its parameters."""

    parameters: tuple[BoundParameter, ...]
    exchange_groups: tuple[ExchangeGroup, ...]
    meshes: tuple[MeshMembers, ...]
    layout: Layout

    @cached_property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.parameters[0].local.device

    @cached_property
    def names(self) -> dict[Tensor, str]:
        """Qualified name of each parameter."""
        return {parameter.tensor: parameter.route.name for parameter in self.parameters}


def bind(
    parameters: Sequence[BoundParameter],
    meshes: tuple[MeshMembers, ...],
    private_groups: PrivateGroups,
    *,
    options: PlanOptions,
    settings: str,
) -> StepPlan:
    """Make the plan, and check that all ranks made the same.

    Collective over ``meshes``; every rank of them must call it.

    Args:
        parameters: All parameters, trainable or not, in the order of the param groups.
        meshes: The meshes of these parameters.
        private_groups: Of this optimizer.
        options: Of the plan.
        settings: What else must be equal on all ranks, for example the dtypes.
    """
    _compare(parameters, meshes, f"{settings} {options}")
    found = _group_jobs(parameters, options)
    private = private_groups.of([home.axes for home, _ in found])
    loads = Loads()
    plans: list[MuonPlan] = []
    for number, ((home, jobs), axes) in enumerate(zip(found, private, strict=True)):
        specs = _specs(jobs)
        plan = plan_step(
            specs,
            num_ranks=axes.size,
            itemsize=options.itemsize,
            chunk_bytes=options.chunk_bytes,
            strategy=options.assignment,
            replica_of=home.replica_of,
            loads=loads.of(home),
            key_prefix=f"{number}.",
            ranks=(axes.rank,),
        )
        check_plan(plan)
        loads.add(home, specs, plan, options.itemsize)
        if axes.group is not None:
            require_equal([("plan", plan.fingerprint())], axes.group, "the plan of ParallelMuon")
        plans.append(plan)
    homes = [home for home, _ in found]
    estimates: Mapping[int, EarlyEstimate | None] = {}
    if options.overlap == "auto":
        estimates = _estimates(list(zip(homes, plans, strict=True)), meshes, options)
    groups: list[ExchangeGroup] = []
    for number, (plan, axes, (home, jobs)) in enumerate(zip(plans, private, found, strict=True)):
        estimate = estimates.get(number)
        sends_early = options.overlap == "backward" or (estimate is not None and estimate.pays)
        groups.append(ExchangeGroup(axes, home.replica_of, tuple(jobs), plan, sends_early, estimate))
    return StepPlan(tuple(parameters), tuple(groups), meshes, parameters[0].layout)


# Coordinate in a mesh -> number of the node of the rank there.
_Nodes = Mapping[tuple[int, ...], int]


def _estimates(
    planned: Sequence[tuple[ExchangeHome, MuonPlan]], meshes: Sequence[MeshMembers], options: PlanOptions
) -> dict[int, EarlyEstimate | None]:
    """Of each exchange group by its number: equal on all ranks of its mesh, each of which brings what it takes itself.

    By the slowest links that any rank of the mesh has. Collective over ``meshes``; every rank of them must call it.
    """
    found: dict[int, EarlyEstimate | None] = {}
    for members in meshes:
        nodes = dict(zip(members.host.coordinates, nodes_of(members.host), strict=True))
        own: dict[int, RankSeconds] = {}
        for number, (home, plan) in enumerate(planned):
            if home.mesh == members.mesh:
                between = (_spans_nodes(nodes, home.sharded), _spans_nodes(nodes, home.mesh_axes))
                machine = machine_of(options.device_type, is_between_machines=between)
                own[number] = rank_seconds(plan.program[home.axes.rank], machine)
        of_ranks = gather(own, members.host.group) if members.host.group is not None else [own]
        # Groups have other numbers on ranks that belong to other meshes, too.
        by_group = zip(*(each.values() for each in of_ranks), strict=True)
        found.update(zip(own, map(estimate_early, by_group), strict=True))
    return found


def _spans_nodes(nodes: _Nodes, axes: Collection[int]) -> bool:
    """Whether, anywhere on the mesh, ranks that differ only along ``axes`` are on several nodes."""
    node_of: dict[tuple[int, ...], int] = {}
    for coordinate, node in nodes.items():
        others = tuple(place for axis, place in enumerate(coordinate) if axis not in axes)
        if node_of.setdefault(others, node) != node:
            return True
    return False


def _compare(parameters: Sequence[BoundParameter], meshes: Sequence[MeshMembers], settings: str) -> None:
    """Raise on all ranks if they differ in a parameter, a hyper-parameter, a mesh or a setting."""
    by_tensor = {parameter.tensor: parameter for parameter in parameters}
    # A rank without one of the meshes is found out on a mesh that it does have, before it is waited for.
    sizes = [members.axes.size for members in meshes if members.axes.group is not None]
    for members in meshes:
        if members.axes.group is None:
            continue
        lines = [(by_tensor[tensor].route.name, _describe(by_tensor[tensor])) for tensor in members.tensors]
        lines += [("settings", settings), ("meshes of", f"{sizes} ranks")]
        require_equal(lines, members.axes.group, "the list of parameters of ParallelMuon")


def _describe(parameter: BoundParameter) -> str:
    _, placements = parameter.mesh_and_placements
    options = {key: value for key, value in parameter.group.items() if key in COMPARED}
    return (
        f"{parameter.shape} {parameter.tensor.dtype} {placements} {parameter.route.kind} {parameter.route.splits} "
        f"trainable={parameter.tensor.requires_grad} {options}"
    )


def _group_jobs(
    parameters: Sequence[BoundParameter], options: PlanOptions
) -> list[tuple[ExchangeHome, list[MatrixJob]]]:
    """Trainable matrices by the ranks among which they travel; those that stay within a replica come first."""
    placed = list(_placed(parameters))
    num_alike: Counter[tuple[DeviceMesh | None, tuple[int, ...]]] = Counter()
    for each in placed:
        num_alike[each.mesh, each.sharded] += len(each.matrices)
    found: dict[ExchangeHome, list[MatrixJob]] = {}
    homes, places = ExchangeHomes(), _Places()
    for each in placed:
        # Matrices of one shape share the answer, for example the experts of a stack.
        answers: dict[tuple[int, int], tuple[list[MatrixJob], _Place]] = {}
        for matrix in each.matrices:
            shape = matrix.rows, matrix.cols
            if shape not in answers:
                is_shared = _is_shared(each, matrix, num_alike[each.mesh, each.sharded], options)
                home = homes.get(each.mesh, each.sharded, is_shared=is_shared)
                answers[shape] = found.setdefault(home, []), places.get(each, home)
            jobs, place = answers[shape]
            jobs.append(MatrixJob(each.parameter, matrix, place.pieces(matrix)))
    return sorted(found.items(), key=lambda item: item[0].spans_replicas)


@dataclass(frozen=True, eq=False)
class _Placed:
    """A trainable parameter with its matrices, where it lies, and the axes of more than one rank that shard it."""

    parameter: BoundParameter
    matrices: tuple[LogicalMatrix, ...]
    mesh: DeviceMesh | None
    mesh_shape: tuple[int, ...]
    placements: tuple[AxisPlacement, ...]
    sharded: tuple[int, ...]


def _placed(parameters: Sequence[BoundParameter]) -> Iterator[_Placed]:
    for parameter in parameters:
        if not parameter.tensor.requires_grad or parameter.route.kind == "elementwise":
            continue
        mesh, placements = parameter.mesh_and_placements
        mesh_shape = tuple(mesh.shape) if mesh is not None else ()
        sharded = sharded_axes(placements, mesh_shape, parameter.route.name)
        matrices = logical_matrices(parameter.shape, parameter.route)
        yield _Placed(parameter, matrices, mesh, mesh_shape, placements, sharded)


def _is_shared(placed: _Placed, matrix: LogicalMatrix, num_matrices: int, options: PlanOptions) -> bool:
    """Whether one owner serves all replicas; ``num_matrices`` lie like this one."""
    if options.dedupe != "auto":
        return options.dedupe == "always"
    replica_ranks = math.prod(placed.mesh_shape[axis] for axis in placed.sharded)
    return sharing_pays(
        _flops(placed.parameter, matrix),
        matrix.box.numel * options.itemsize,
        device_type=options.device_type,
        num_matrices=num_matrices,
        num_replicas=math.prod(placed.mesh_shape) // replica_ranks,
        replica_ranks=replica_ranks,
    )


class _Place:
    """How the parameters of one shape and placement lie on the ranks of a home."""

    def __init__(self, placed: _Placed, home: ExchangeHome) -> None:
        shape = placed.parameter.shape
        self._home = home
        self._shards = Shards(held_boxes(shape, placed.mesh_shape, placed.placements, home.axes.coordinates))
        self._known: dict[Box, Pieces] = {}

    def pieces(self, matrix: LogicalMatrix) -> Pieces:
        """Where a matrix of such a parameter lies."""
        if matrix.box not in self._known:
            self._known[matrix.box] = self._find(matrix)
        return self._known[matrix.box]

    def _find(self, matrix: LogicalMatrix) -> Pieces:
        axes, replica_of = self._home.axes, self._home.replica_of
        by_rank = self._shards.pieces(matrix.box)
        replica = [piece for rank, piece in by_rank.items() if replica_of[rank] == replica_of[axes.rank]]
        if not tile(replica, matrix.box):
            raise ValueError(
                f"the shards of {matrix.name} are no contiguous parts that make up the whole: {replica[:4]}; "
                "ParallelMuon does not take this order of sharding"
            )
        held = [0] * axes.size
        for rank, piece in by_rank.items():
            held[rank] = piece.numel
        mine, outer = by_rank.get(axes.rank), self._shards.boxes[axes.rank]
        return Pieces(by_rank, tuple(held), None if mine in (None, outer) else mine.slices_in(outer))


class _Places:
    """Makes each place once: a large model has few different shapes."""

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], _Place] = {}

    def get(self, placed: _Placed, home: ExchangeHome) -> _Place:
        """How a parameter lies on the ranks of ``home``."""
        key = home, placed.parameter.shape, placed.placements
        if key not in self._found:
            self._found[key] = _Place(placed, home)
        return self._found[key]


def _specs(jobs: Sequence[MatrixJob]) -> list[MatrixSpec]:
    # Equal tuples are one object: the planner is fast for those.
    shared: dict[tuple[int, ...], tuple[int, ...]] = {}
    held = {pieces: shared.setdefault(pieces.held, pieces.held) for pieces in {job.pieces: None for job in jobs}}
    return [
        MatrixSpec(
            name=job.matrix.name,
            numel=job.matrix.rows * job.matrix.cols,
            flops=_flops(job.parameter, job.matrix),
            held=held[job.pieces],
            rows=job.matrix.rows,
            cols=job.matrix.cols,
        )
        for job in jobs
    ]


def _flops(parameter: BoundParameter, matrix: LogicalMatrix) -> int:
    return newton_schulz_flops(matrix.rows, matrix.cols, parameter.group["ns_steps"])
