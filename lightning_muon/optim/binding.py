"""Tie the parameters of an optimizer to matrices, exchange groups and a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.comm.agreement import require_equal
from lightning_muon.comm.mesh import ALONE, AxisGroup, axis_group
from lightning_muon.math.newton_schulz import newton_schulz_flops
from lightning_muon.params.layout import held_boxes, mesh_and_placements, sharded_axes
from lightning_muon.params.logical import Box, LogicalMatrix, logical_matrices
from lightning_muon.params.routing import Route
from lightning_muon.schedule.muon import MatrixSpec, MuonPlan, plan_step

ParamGroup = dict[str, Any]


@dataclass(frozen=True, eq=False)
class BoundParameter:
    """A parameter, its param group, its route, and where it lives."""

    tensor: torch.nn.Parameter
    group: ParamGroup
    route: Route
    mesh: DeviceMesh | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return tuple(self.tensor.shape)


@dataclass(frozen=True, eq=False)
class MatrixJob:
    """One Newton-Schulz job: a logical matrix and the part of it that each rank of the exchange group holds."""

    parameter: BoundParameter
    matrix: LogicalMatrix
    pieces: tuple[Box, ...]
    held: Box

    def local_view(self, local: Tensor, rank: int) -> Tensor:
        """The calling rank's piece, in its local tensor (parameter, gradient or momentum)."""
        return local[self.pieces[rank].slices_in(self.held)]


@dataclass(frozen=True, eq=False)
class ExchangeGroup:
    """The jobs whose pieces lie on the same ranks, and their plan."""

    axes: AxisGroup
    is_replicated: bool
    jobs: tuple[MatrixJob, ...]
    plan: MuonPlan


@dataclass(frozen=True, eq=False)
class Binding:
    """Everything that :class:`~lightning_muon.ParallelMuon` knows of its parameters."""

    parameters: tuple[BoundParameter, ...]
    exchange_groups: tuple[ExchangeGroup, ...]
    meshes: tuple[tuple[AxisGroup, tuple[BoundParameter, ...]], ...]


def bind(parameters: Sequence[BoundParameter], *, itemsize: int, chunk_bytes: int, settings: str) -> Binding:
    """Make the plan, and check that all ranks made the same.

    Collective over every mesh of the parameters; every rank of it must call it.

    Args:
        parameters: All parameters, trainable or not, in the order of the param groups.
        itemsize: Bytes of an element on the wire.
        chunk_bytes: Upper bound of the bytes of matrices that travel together.
        settings: What else must be equal on all ranks, for example the dtypes.
    """
    meshes = _group_by_mesh(parameters)
    for axes, members in meshes:
        lines = [(member.route.name, _describe(member)) for member in members]
        require_equal([*lines, ("settings", settings)], axes.group, "the list of parameters of ParallelMuon")
    groups = tuple(
        ExchangeGroup(axes, is_replicated, tuple(jobs), _plan(jobs, axes.size, itemsize, chunk_bytes))
        for axes, is_replicated, jobs in _group_jobs(parameters)
    )
    return Binding(tuple(parameters), groups, meshes)


def _describe(parameter: BoundParameter) -> str:
    _, placements = mesh_and_placements(parameter.tensor, parameter.mesh)
    return (
        f"{parameter.shape} {parameter.tensor.dtype} {placements} {parameter.route.kind} {parameter.route.splits} "
        f"trainable={parameter.tensor.requires_grad}"
    )


def _group_by_mesh(parameters: Sequence[BoundParameter]) -> tuple[tuple[AxisGroup, tuple[BoundParameter, ...]], ...]:
    """Parameters by the mesh they live on, with the group over all of its axes; local ones come last, alone."""
    members: dict[DeviceMesh | None, list[BoundParameter]] = {}
    for parameter in parameters:
        mesh, _ = mesh_and_placements(parameter.tensor, parameter.mesh)
        members.setdefault(mesh, []).append(parameter)
    return tuple(
        (ALONE if mesh is None else axis_group(mesh, tuple(range(mesh.ndim))), tuple(found))
        for mesh, found in members.items()
    )


def _group_jobs(parameters: Sequence[BoundParameter]) -> list[tuple[AxisGroup, bool, list[MatrixJob]]]:
    """Trainable matrices by the ranks among which they must travel.

    A sharded matrix travels over the axes that shard it, so each replica repeats Newton-Schulz; a replicated one is
    computed once and told to all ranks of its mesh.
    """
    found: dict[tuple[DeviceMesh | None, tuple[int, ...], bool], list[MatrixJob]] = {}
    axis_groups: dict[tuple[DeviceMesh | None, tuple[int, ...]], AxisGroup] = {}
    for parameter in parameters:
        if not parameter.tensor.requires_grad or parameter.route.kind == "elementwise":
            continue
        mesh, placements = mesh_and_placements(parameter.tensor, parameter.mesh)
        mesh_shape = tuple(mesh.shape) if mesh is not None else ()
        axes = sharded_axes(placements, mesh_shape, parameter.route.name)
        is_replicated = not axes
        if is_replicated:
            axes = tuple(range(len(mesh_shape)))
        if (mesh, axes) not in axis_groups:
            axis_groups[mesh, axes] = ALONE if mesh is None else axis_group(mesh, axes)
        group = axis_groups[mesh, axes]
        boxes = held_boxes(parameter.shape, mesh_shape, placements, group.coordinates)
        jobs = [
            _job(parameter, matrix, boxes, group.rank) for matrix in logical_matrices(parameter.shape, parameter.route)
        ]
        found.setdefault((mesh, axes, is_replicated), []).extend(jobs)
    return [(axis_groups[mesh, axes], is_replicated, jobs) for (mesh, axes, is_replicated), jobs in found.items()]


def _job(parameter: BoundParameter, matrix: LogicalMatrix, boxes: Sequence[Box], rank: int) -> MatrixJob:
    pieces = tuple(matrix.box.intersect(box) for box in boxes)
    covered = sum(piece.numel for piece in pieces)
    if covered not in (matrix.box.numel, matrix.box.numel * len(boxes)):
        raise ValueError(
            f"the shards of {matrix.name} hold {covered} elements of its {matrix.box.numel}: its placements overlap or "
            "leave gaps, which ParallelMuon does not take"
        )
    return MatrixJob(parameter, matrix, pieces, boxes[rank])


def _plan(jobs: Sequence[MatrixJob], num_ranks: int, itemsize: int, chunk_bytes: int) -> MuonPlan:
    specs = [
        MatrixSpec(
            name=job.matrix.name,
            numel=job.matrix.box.numel,
            flops=newton_schulz_flops(job.matrix.rows, job.matrix.cols, job.parameter.group["ns_steps"]),
            held=tuple(piece.numel for piece in job.pieces),
        )
        for job in jobs
    ]
    return plan_step(specs, num_ranks=num_ranks, itemsize=itemsize, chunk_bytes=chunk_bytes)


def local_tensor(tensor: Tensor) -> Tensor:
    """The calling rank's part of a DTensor, or the tensor itself. Shares memory."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
