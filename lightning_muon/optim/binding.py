"""Tie the parameters of an optimizer to matrices, exchange groups and a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.comm.agreement import require_equal
from lightning_muon.comm.mesh import ALONE, AxisGroup, axis_group
from lightning_muon.math.newton_schulz import newton_schulz_flops
from lightning_muon.optim.meshes import MeshMembers
from lightning_muon.params.layout import held_boxes, mesh_and_placements, sharded_axes
from lightning_muon.params.logical import Box, LogicalMatrix, logical_matrices, tile
from lightning_muon.params.routing import Route
from lightning_muon.schedule.muon import MatrixSpec, MuonPlan, plan_step

ParamGroup = dict[str, Any]
# Hyper-parameters of a param group that must be equal on all ranks.
COMPARED = (
    *("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"),
    *("betas", "adamw_eps", "algorithm"),
)


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
    meshes: tuple[MeshMembers, ...]

    @cached_property
    def names(self) -> dict[Tensor, str]:
        """Qualified name of each parameter."""
        return {parameter.tensor: parameter.route.name for parameter in self.parameters}


def bind(
    parameters: Sequence[BoundParameter],
    meshes: tuple[MeshMembers, ...],
    *,
    itemsize: int,
    chunk_bytes: int,
    settings: str,
) -> Binding:
    """Make the plan, and check that all ranks made the same.

    Collective over ``meshes``; every rank of them must call it.

    Args:
        parameters: All parameters, trainable or not, in the order of the param groups.
        meshes: The meshes of these parameters.
        itemsize: Bytes of an element on the wire.
        chunk_bytes: Upper bound of the bytes of matrices that travel together.
        settings: What else must be equal on all ranks, for example the dtypes.
    """
    _compare(parameters, meshes, settings)
    groups = tuple(
        ExchangeGroup(axes, is_replicated, tuple(jobs), _plan(jobs, axes.size, itemsize, chunk_bytes))
        for axes, is_replicated, jobs in _group_jobs(parameters)
    )
    for group in groups:
        if group.axes.group is not None:
            require_equal([("plan", group.plan.fingerprint())], group.axes.group, "the plan of ParallelMuon")
    return Binding(tuple(parameters), groups, meshes)


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
    _, placements = mesh_and_placements(parameter.tensor, parameter.mesh)
    options = {key: value for key, value in parameter.group.items() if key in COMPARED}
    return (
        f"{parameter.shape} {parameter.tensor.dtype} {placements} {parameter.route.kind} {parameter.route.splits} "
        f"trainable={parameter.tensor.requires_grad} {options}"
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
    is_replicated = all(piece == matrix.box for piece in pieces)
    if not is_replicated and not tile(pieces, matrix.box):
        raise ValueError(
            f"the shards of {matrix.name} are no contiguous parts that make up the whole: {pieces[:4]}; "
            "ParallelMuon does not take this order of sharding"
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
