"""The plan of an optimizer: exchange groups, owners, and the program that every step runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_muon.comm.agreement import gather, require_equal
from lightning_muon.comm.groups import ALONE, AxisGroup, PrivateGroups, axis_group, nodes_of
from lightning_muon.optim.parameters import COMPARED, BoundParameter, MeshMembers, ParamGroup
from lightning_muon.params.exchange import (
    MeshRanks,
    ParameterToPlan,
    Pieces,
    PlannedExchange,
    PlanOptions,
    plan_exchanges,
)
from lightning_muon.params.layout import Layout, StepPart
from lightning_muon.params.logical import LogicalMatrix
from lightning_muon.schedule.estimates import PrefetchEstimate, RankSeconds, estimate_prefetch, machine_of, rank_seconds
from lightning_muon.schedule.muon import MuonPlan
from lightning_muon.schedule.program import ADAMW, GATHER, MOMENTUM, UPDATE, Op
from lightning_muon.schedule.step import fingerprint, step_program
from lightning_muon.schedule.validate import check_step

# AdamW reads gradient, weight and two moments, and writes the last three.
_ADAMW_TENSORS = 7


@dataclass(frozen=True, eq=False)
class MatrixJob:
    """One Newton-Schulz job: a logical matrix and where it lies."""

    parameter: BoundParameter  # The parameter it belongs to.
    matrix: LogicalMatrix  # Its box in the parameter.
    pieces: Pieces  # Where it lies.

    def local_view(self, local: Tensor) -> Tensor:
        """The calling rank's piece, which must have elements, in its local tensor: parameter, gradient or momentum."""
        slices = self.pieces.slices
        return local if slices is None else local[slices]


@dataclass(frozen=True, eq=False)
class ExchangeGroup:
    """The jobs whose pieces lie on the same ranks, and their plan."""

    axes: AxisGroup  # Ranks that communicate, over a process group of this exchange group alone.
    # Replica of each of these ranks; the ranks of a replica hold the whole matrices together.
    replica_of: tuple[int, ...]
    jobs: tuple[MatrixJob, ...]  # Matrices.
    plan: MuonPlan  # Owners and buckets.
    sends_early: bool  # Whether gathers start during backward; equal on all ranks of the mesh.
    # What `overlap="auto"` has decided by; `None` if nothing is gathered or the user has decided.
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
class MatrixBucket:
    """Matrices that travel together."""

    key: str  # Of its ops.
    group: ExchangeGroup  # Their exchange group.
    taken: tuple[int, ...]  # Their indices in `group.jobs`.

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The parameters of the bucket, each once; equal on all ranks."""
        return list(dict.fromkeys(self.group.jobs[index].parameter.tensor for index in self.taken))


@dataclass(frozen=True, eq=False)
class ElementwiseBatch:
    """Parameters that one ``adamw`` op updates, since their gradients arrive together."""

    by_group: tuple[tuple[ParamGroup, tuple[Tensor, ...]], ...]

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [tensor for _, tensors in self.by_group for tensor in tensors]


@dataclass(frozen=True, eq=False)
class StepPlan:
    """Everything that :class:`~lightning_muon.ParallelMuon` knows of its parameters."""

    parameters: tuple[BoundParameter, ...]  # All of them, in the order of the param groups.
    meshes: tuple[MeshMembers, ...]  # On which they live.
    layout: Layout  # Where they lie on these.
    exchange_groups: tuple[ExchangeGroup, ...]  # Matrices by the ranks among which they travel.
    # Matrices that travel together, by the key of their ops, in the order of the step.
    buckets: Mapping[str, MatrixBucket]
    batches: tuple[ElementwiseBatch, ...]  # Other parameters, by the number in the key of their op.
    part: StepPart  # What the layout or the optimizer adds to the step.
    # Everything that this rank runs in a step, in this order; ranks are those of each op's own group. Made here,
    # checked here, and nowhere changed.
    ops: tuple[Op, ...]

    @cached_property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.parameters[0].local.device

    @cached_property
    def names(self) -> dict[Tensor, str]:
        """Qualified name of each parameter."""
        return {parameter.tensor: parameter.route.name for parameter in self.parameters}


def make_step_plan(
    parameters: Sequence[BoundParameter],
    meshes: tuple[MeshMembers, ...],
    private_groups: PrivateGroups,
    *,
    options: PlanOptions,
    make_part: Callable[[Mapping[str, Sequence[Tensor]], Mapping[str, Sequence[Tensor]]], StepPart],
) -> StepPlan:
    """Make the plan and the program, check them, and check that all ranks made the same.

    Collective over ``meshes``; every rank of them must call it.

    Args:
        parameters: All parameters, trainable or not, in the order of the param groups; equal on all ranks.
        meshes: The meshes of these parameters.
        private_groups: Of this optimizer.
        options: Of the plan.
        make_part: Returns what else the step does, see :meth:`.Layout.step_part`; its second argument are the names of
            the ops that read gradients, and whose.
    """
    layout = parameters[0].layout
    groups = _exchange_groups(parameters, meshes, private_groups, options)
    buckets = {
        f"{number}.{index}": MatrixBucket(f"{number}.{index}", group, taken)
        for number, group in enumerate(groups)
        for index, taken in enumerate(group.plan.buckets)
    }
    batches = _batches(parameters, layout)
    matrices = [op for group in groups for op in group.plan.program[group.axes.rank]]
    adamw = [
        Op(
            kind=ADAMW,
            key=str(number),
            rank=0,
            bytes=_ADAMW_TENSORS * sum(layout.local(t).nbytes for t in each.tensors),
        )
        for number, each in enumerate(batches)
    ]
    last_op = {tensor: op.name for op, each in zip(adamw, batches, strict=True) for tensor in each.tensors}
    last_op |= {tensor: op.name for op in matrices if op.kind == UPDATE for tensor in buckets[op.key].tensors}
    done: dict[str, list[Tensor]] = {op.name: [] for op in (*adamw, *matrices)}
    for tensor, name in last_op.items():
        done[name].append(tensor)
    reads = {op.name: each.tensors for op, each in zip(adamw, batches, strict=True)}
    reads |= {op.name: buckets[op.key].tensors for op in matrices if op.kind == MOMENTUM}
    part = make_part(done, reads)
    (ops,) = step_program(
        {0: [*matrices, *adamw]},
        look_ahead=0 if options.overlap == "off" else options.look_ahead,
        early=[op.key for op in matrices if op.kind == GATHER and _is_early(buckets[op.key])],
        is_late=layout.may_arrive_late,
        added={0: part.ops},
    ).values()
    check_step({0: ops}, [group.plan for group in groups], is_whole=False)
    for group in groups:
        if group.axes.group is not None:
            own = [op for op in ops if op.key in buckets and buckets[op.key].group is group]
            require_equal(
                [("plan", group.plan.fingerprint()), ("program", fingerprint(own))],
                group.axes.group,
                "the plan of ParallelMuon",
            )
    return StepPlan(
        parameters=tuple(parameters),
        meshes=meshes,
        layout=layout,
        exchange_groups=groups,
        buckets=buckets,
        batches=batches,
        part=part,
        ops=tuple(ops),
    )


def _is_early(bucket: MatrixBucket) -> bool:
    """Whether the bucket may be sent during backward: its gradients must be sharded by then."""
    return bucket.group.sends_early and all(isinstance(tensor, DTensor) for tensor in bucket.tensors)


def _batches(parameters: Sequence[BoundParameter], layout: Layout) -> tuple[ElementwiseBatch, ...]:
    """The parameters that are no matrices, those together whose gradients arrive together."""
    groups: dict[Tensor, ParamGroup] = {
        each.tensor: each.group for each in parameters if each.route.algorithm == "adamw"
    }
    batches: list[ElementwiseBatch] = []
    for tensors in layout.in_order(list(groups)) if groups else ():
        by_group: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            by_group.setdefault(id(groups[tensor]), []).append(tensor)
        batches.append(ElementwiseBatch(tuple((groups[members[0]], tuple(members)) for members in by_group.values())))
    return tuple(batches)


def _exchange_groups(
    parameters: Sequence[BoundParameter],
    meshes: Sequence[MeshMembers],
    private_groups: PrivateGroups,
    options: PlanOptions,
) -> tuple[ExchangeGroup, ...]:
    """Collective over ``meshes``; every rank of them must call it."""
    planned, bound = _plan(parameters, meshes, options)
    axes_of = [axis_group(mesh, each.ranks.mesh_axes) if mesh is not None else ALONE for mesh, each in planned]
    private = private_groups.of(axes_of)
    estimates: Mapping[int, PrefetchEstimate | None] = {}
    if options.overlap == "auto":
        estimates = _estimates(planned, meshes, options)
    groups: list[ExchangeGroup] = []
    for number, ((_, each), axes) in enumerate(zip(planned, private, strict=True)):
        estimate = estimates.get(number)
        sends_early = options.overlap == "backward" or (estimate is not None and estimate.pays)
        jobs = tuple(MatrixJob(bound[placed.parameter], placed.matrix, placed.pieces) for placed in each.matrices)
        groups.append(ExchangeGroup(axes, each.ranks.replica_of, jobs, each.plan, sends_early, estimate))
    return tuple(groups)


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


def require_equal_parameters(
    parameters: Sequence[BoundParameter], meshes: Sequence[MeshMembers], settings: str
) -> None:
    """Raise on all ranks if they differ in a parameter, a hyper-parameter, a mesh or a setting.

    Collective over ``meshes``; every rank of them must call it.

    Args:
        parameters: In the order of the param groups.
        meshes: The meshes of these parameters.
        settings: What else must be equal, for example the dtypes.
    """
    by_tensor: dict[Tensor, BoundParameter] = {parameter.tensor: parameter for parameter in parameters}
    # Compare the list of meshes on each mesh, smaller ones first, so that a missing mesh raises and does not hang.
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
