"""Tie the parameters of an optimizer to matrices, exchange groups and a plan."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.comm.agreement import require_equal
from lightning_muon.comm.mesh import AxisGroup, PrivateGroups
from lightning_muon.config import Assignment, Dedupe, Overlap, check_hyperparameters
from lightning_muon.math.newton_schulz import newton_schulz_flops
from lightning_muon.optim.homes import ExchangeHome, ExchangeHomes, Loads
from lightning_muon.optim.meshes import MeshMembers
from lightning_muon.params.layout import AxisPlacement, Layout, held_boxes, sharded_axes
from lightning_muon.params.logical import Box, LogicalMatrix, logical_matrices, tile
from lightning_muon.params.routing import Route
from lightning_muon.schedule.dedupe import sharing_pays
from lightning_muon.schedule.muon import MatrixSpec, MuonPlan, plan_step
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

        Values that were right the last time are not looked at again. The value of a learning rate that is a tensor on
        a device is not looked at, since the host would have to wait for it.
        """
        try:
            values = list(map(_VALUES, groups))
        except KeyError:
            values = []
        for number, group in enumerate(groups):
            is_known = number < len(values) and number < len(self._right) and values[number] == self._right[number]
            if not is_known or (isinstance(group["lr"], Tensor) and group["lr"].device.type == "cpu"):
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
        ValueError: If a hyper-parameter is out of range.
    """
    groups = [dict(group) for group in saved]
    for group, before in zip(groups, own, strict=False):
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
class MatrixJob:
    """One Newton-Schulz job: a logical matrix and the part of it that each rank of the exchange group holds.

    Attributes:
        parameter: The parameter it belongs to.
        matrix: Its box in the parameter.
        pieces: The part of it on each rank.
        held: The box of the parameter that the calling rank holds.
        slices: The calling rank's piece in its local tensor.
    """

    parameter: BoundParameter
    matrix: LogicalMatrix
    pieces: tuple[Box, ...]
    held: Box
    slices: tuple[slice, ...]

    def local_view(self, local: Tensor) -> Tensor:
        """The calling rank's piece, in its local tensor (parameter, gradient or momentum)."""
        piece = local[self.slices]
        # FSDP2 leaves a part without elements no rows either, whatever its box says.
        return piece if piece.numel() else piece.view([part.stop - part.start for part in self.slices])


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What decides over owners, chunks and order; see :class:`~lightning_muon.config.MuonConfig`.

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
        plan: Owners and chunks.
    """

    axes: AxisGroup
    replica_of: tuple[int, ...]
    jobs: tuple[MatrixJob, ...]
    plan: MuonPlan


@dataclass(frozen=True, eq=False)
class Binding:
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
) -> Binding:
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
    groups: list[ExchangeGroup] = []
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
        )
        check_plan(plan)
        loads.add(home, specs, plan, options.itemsize)
        if axes.group is not None:
            require_equal([("plan", plan.fingerprint())], axes.group, "the plan of ParallelMuon")
        groups.append(ExchangeGroup(axes, home.replica_of, tuple(jobs), plan))
    return Binding(tuple(parameters), tuple(groups), meshes, parameters[0].layout)


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
    matrices = list(_placed_matrices(parameters))
    num_alike = Counter((placed.mesh, placed.sharded) for placed in matrices)
    found: dict[ExchangeHome, list[MatrixJob]] = {}
    homes = ExchangeHomes()
    for placed in matrices:
        is_shared = _is_shared(placed, num_alike[placed.mesh, placed.sharded], options)
        home = homes.get(placed.mesh, placed.sharded, is_shared=is_shared)
        found.setdefault(home, []).append(_job(placed, home))
    return sorted(found.items(), key=lambda item: item[0].spans_replicas)


@dataclass(frozen=True, eq=False)
class _PlacedMatrix:
    """A trainable matrix, the mesh of its parameter, and the axes of more than one rank that shard it."""

    parameter: BoundParameter
    matrix: LogicalMatrix
    mesh: DeviceMesh | None
    sharded: tuple[int, ...]

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        return tuple(self.mesh.shape) if self.mesh is not None else ()


def _placed_matrices(parameters: Sequence[BoundParameter]) -> Iterator[_PlacedMatrix]:
    for parameter in parameters:
        if not parameter.tensor.requires_grad or parameter.route.kind == "elementwise":
            continue
        mesh, placements = parameter.mesh_and_placements
        sharded = sharded_axes(placements, tuple(mesh.shape) if mesh is not None else (), parameter.route.name)
        for matrix in logical_matrices(parameter.shape, parameter.route):
            yield _PlacedMatrix(parameter, matrix, mesh, sharded)


def _is_shared(placed: _PlacedMatrix, num_matrices: int, options: PlanOptions) -> bool:
    """Whether one owner serves all replicas; ``num_matrices`` lie like this one."""
    if options.dedupe != "auto":
        return options.dedupe == "always"
    replica_ranks = math.prod(placed.mesh_shape[axis] for axis in placed.sharded)
    return sharing_pays(
        _flops(placed.parameter, placed.matrix),
        placed.matrix.box.numel * options.itemsize,
        device_type=options.device_type,
        num_matrices=num_matrices,
        num_replicas=math.prod(placed.mesh_shape) // replica_ranks,
        replica_ranks=replica_ranks,
    )


def _job(placed: _PlacedMatrix, home: ExchangeHome) -> MatrixJob:
    parameter, matrix, rank = placed.parameter, placed.matrix, home.axes.rank
    _, placements = parameter.mesh_and_placements
    boxes = held_boxes(parameter.shape, placed.mesh_shape, placements, home.axes.coordinates)
    pieces = tuple(matrix.box.intersect(box) for box in boxes)
    replica = [piece for piece, index in zip(pieces, home.replica_of, strict=True) if index == home.replica_of[rank]]
    if not tile(replica, matrix.box):
        raise ValueError(
            f"the shards of {matrix.name} are no contiguous parts that make up the whole: {replica[:4]}; "
            "ParallelMuon does not take this order of sharding"
        )
    return MatrixJob(parameter, matrix, pieces, boxes[rank], pieces[rank].slices_in(boxes[rank]))


def _specs(jobs: Sequence[MatrixJob]) -> list[MatrixSpec]:
    # Equal tuples are one object: the planner is fast for those.
    shared: dict[tuple[int, ...], tuple[int, ...]] = {}
    specs: list[MatrixSpec] = []
    for job in jobs:
        held = tuple(piece.numel for piece in job.pieces)
        specs.append(
            MatrixSpec(
                name=job.matrix.name,
                numel=job.matrix.box.numel,
                flops=_flops(job.parameter, job.matrix),
                held=shared.setdefault(held, held),
                rows=job.matrix.rows,
                cols=job.matrix.cols,
            )
        )
    return specs


def _flops(parameter: BoundParameter, matrix: LogicalMatrix) -> int:
    return newton_schulz_flops(matrix.rows, matrix.cols, parameter.group["ns_steps"])
