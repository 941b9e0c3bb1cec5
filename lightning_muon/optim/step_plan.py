"""Tie the parameters of an optimizer to matrices, exchange groups and a plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.comm.agreement import gather, require_equal
from lightning_muon.comm.groups import ALONE, AxisGroup, PrivateGroups, axis_group, nodes_of
from lightning_muon.config import check_hyperparameters
from lightning_muon.optim.meshes import MeshMembers
from lightning_muon.params.exchange import (
    MeshRanks,
    ParameterToPlan,
    Pieces,
    PlannedExchange,
    PlanOptions,
    plan_exchanges,
)
from lightning_muon.params.layout import AxisPlacement, Layout
from lightning_muon.params.logical import LogicalMatrix
from lightning_muon.params.routing import Route
from lightning_muon.schedule.estimates import PrefetchEstimate, RankSeconds, estimate_prefetch, machine_of, rank_seconds
from lightning_muon.schedule.muon import MuonPlan
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
    estimate: PrefetchEstimate | None

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
    planned, bound = _plan(parameters, meshes, options)
    axes_of = [axis_group(mesh, each.ranks.mesh_axes) if mesh is not None else ALONE for mesh, each in planned]
    private = private_groups.of(axes_of)
    for (_, each), axes in zip(planned, private, strict=True):
        check_plan(each.plan)
        if axes.group is not None:
            require_equal([("plan", each.plan.fingerprint())], axes.group, "the plan of ParallelMuon")
    estimates: Mapping[int, PrefetchEstimate | None] = {}
    if options.overlap == "auto":
        estimates = _estimates(planned, meshes, options)
    groups: list[ExchangeGroup] = []
    for number, ((_, each), axes) in enumerate(zip(planned, private, strict=True)):
        estimate = estimates.get(number)
        sends_early = options.overlap == "backward" or (estimate is not None and estimate.pays)
        jobs = tuple(MatrixJob(bound[placed.parameter], placed.matrix, placed.pieces) for placed in each.matrices)
        groups.append(ExchangeGroup(axes, each.ranks.replica_of, jobs, each.plan, sends_early, estimate))
    return StepPlan(tuple(parameters), tuple(groups), meshes, parameters[0].layout)


# With the mesh of the parameters.
_Planned = Sequence[tuple[DeviceMesh | None, PlannedExchange]]


def _plan(
    parameters: Sequence[BoundParameter], meshes: Sequence[MeshMembers], options: PlanOptions
) -> tuple[_Planned, list[BoundParameter]]:
    """The exchange groups, and the parameters to which their matrices belong. Local."""
    ranks = {
        members.mesh: MeshRanks(
            () if members.mesh is None else tuple(members.mesh.shape), members.axes.coordinates, members.axes.rank
        )
        for members in meshes
    }
    bound: list[BoundParameter] = []
    to_plan: list[ParameterToPlan] = []
    for each in parameters:
        if each.tensor.requires_grad and each.route.kind != "elementwise":
            mesh, placements = each.mesh_and_placements
            bound.append(each)
            to_plan.append(ParameterToPlan(each.route, each.shape, ranks[mesh], placements, each.group["ns_steps"]))
    mesh_of = {found: mesh for mesh, found in ranks.items()}
    return [(mesh_of[each.ranks.mesh], each) for each in plan_exchanges(to_plan, options)], bound


# Coordinate in a mesh -> number of the node of the rank there.
_Nodes = Mapping[tuple[int, ...], int]


def _estimates(
    planned: _Planned, meshes: Sequence[MeshMembers], options: PlanOptions
) -> dict[int, PrefetchEstimate | None]:
    """Of each exchange group by its number: equal on all ranks of its mesh, each of which brings what it takes itself.

    By the slowest links that any rank of the mesh has. Collective over ``meshes``; every rank of them must call it.
    """
    found: dict[int, PrefetchEstimate | None] = {}
    for members in meshes:
        nodes = dict(zip(members.host.coordinates, nodes_of(members.host), strict=True))
        own: dict[int, RankSeconds] = {}
        for number, (mesh, each) in enumerate(planned):
            if mesh == members.mesh:
                ranks = each.ranks
                between = (_spans_nodes(nodes, ranks.sharded), _spans_nodes(nodes, ranks.mesh_axes))
                machine = machine_of(options.device_type, is_between_machines=between)
                own[number] = rank_seconds(each.plan.program[ranks.rank], machine)
        of_ranks = gather(own, members.host.group) if members.host.group is not None else [own]
        # Groups have other numbers on ranks that belong to other meshes, too.
        by_group = zip(*(each.values() for each in of_ranks), strict=True)
        found.update(zip(own, map(estimate_prefetch, by_group), strict=True))
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
