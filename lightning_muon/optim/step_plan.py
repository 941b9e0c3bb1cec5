"""The plan of an optimizer: exchange groups, owners, and the program that every step runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lightning_muon.comm.agreement import require_equal, together
from lightning_muon.optim.parameters import ParamGroup, compared
from lightning_muon.params.layout import Layout, Matrix, MeshMembers, RoutedParameter
from lightning_muon.schedule.exchange import ADAMW_TENSORS, ExchangeGroup, PlanOptions, plan_exchanges
from lightning_muon.schedule.program import Op, OpKind, issue_ahead, validate


@dataclass(frozen=True, eq=False)
class MatrixBucket:
    """Matrices that travel together."""

    group: ExchangeGroup  # Their exchange group.
    matrices: tuple[Matrix, ...]

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The parameters of the bucket, each once; equal on all ranks."""
        return list(dict.fromkeys(matrix.parameter.tensor for matrix in self.matrices))


@dataclass(frozen=True, eq=False)
class StepPlan:
    """Everything that :class:`~lightning_muon.ParallelMuon` knows of its parameters, and the ops of a step."""

    parameters: tuple[RoutedParameter, ...]  # All of them, in the order of the param groups.
    meshes: tuple[MeshMembers, ...]  # Meshes on which they live.
    layout: Layout  # Where they lie on the meshes.
    exchange_groups: tuple[ExchangeGroup, ...]  # Matrices by the ranks among which they travel.
    # Matrices that travel together, by the key of their ops, in the order of the step.
    buckets: Mapping[str, MatrixBucket]
    elementwise: Sequence[tuple[ParamGroup, Sequence[Tensor]]]  # Other parameters, which op `adamw` updates.
    done: Mapping[str, Sequence[Tensor]]  # Name of an op -> parameters that have their new values after it.
    options: PlanOptions
    # All ops that this rank runs in a step, in this order; ranks are those of each op's own group. Made and checked in
    # this module, and changed nowhere.
    ops: tuple[Op, ...]

    @cached_property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.layout.local(self.parameters[0].tensor).device

    @cached_property
    def groups_of(self) -> Mapping[MeshMembers, Sequence[ParamGroup]]:
        """The param groups of the parameters on each mesh, once each, in the order of the parameters."""
        group: dict[Tensor, ParamGroup] = {each.tensor: each.group for each in self.parameters}
        return {
            members: list({id(group[tensor]): group[tensor] for tensor in members.tensors}.values())
            for members in self.meshes
        }

    @cached_property
    def names(self) -> dict[Tensor, str]:
        """Qualified name of each parameter."""
        return {parameter.tensor: parameter.route.name for parameter in self.parameters}


def make_step_plan(
    parameters: Sequence[RoutedParameter],
    meshes: tuple[MeshMembers, ...],
    *,
    options: PlanOptions,
) -> StepPlan:
    """Make the plan and the program of all ``parameters``, check them, and check that all ranks made the same.

    Collective over ``meshes``.
    """
    layout = parameters[0].layout
    trained = [each for each in parameters if each.tensor.requires_grad and each.route.kind != "elementwise"]
    groups = tuple(plan_exchanges(trained, meshes, options))
    buckets = {
        f"{number}.{index}": MatrixBucket(group, tuple(group.matrices[each] for each in taken))
        for number, group in enumerate(groups)
        for index, taken in enumerate(group.buckets)
    }
    matrices = [op for group in groups for op in group.program[group.axes.rank]]
    elementwise = _elementwise(parameters)
    others = [tensor for _, members in elementwise for tensor in members]
    num_bytes = ADAMW_TENSORS * sum(layout.local(tensor).nbytes for tensor in others)
    adamw = [Op(kind=OpKind.ADAMW, key="all", rank=0, bytes=num_bytes)] if others else []
    updates = {op.name: others for op in adamw}
    updates |= {op.name: buckets[op.key].tensors for op in matrices if op.kind == OpKind.UPDATE}
    # A parameter of several matrices is updated once the last of them is.
    last = {tensor: name for name, tensors in updates.items() for tensor in tensors}
    done = {name: [tensor for tensor in tensors if last[tensor] == name] for name, tensors in updates.items()}
    (ops,) = issue_ahead({0: [*matrices, *adamw]}, options.issued_ahead).values()
    validate({0: [replace(op, group=(), rank=0) for op in ops]})  # The order of messages is compared below.
    _require_equal_plans(groups, buckets, ops)
    return StepPlan(tuple(parameters), meshes, layout, groups, buckets, elementwise, done, options, tuple(ops))


def _require_equal_plans(
    groups: Sequence[ExchangeGroup], buckets: Mapping[str, MatrixBucket], ops: Sequence[Op]
) -> None:
    """Raise on all ranks unless those of each process group have the same owners, buckets and order of communications.

    Collective over the axes of ``groups``.
    """
    for process_group, axes in {group.axes.group: group.axes for group in groups}.items():
        own = [group for group in groups if group.axes.group is process_group]
        of_own = {key: each for key, each in buckets.items() if each.group in own}
        lines = [(matrix.name, f"is owned by rank {matrix.owner}") for group in own for matrix in group.matrices]
        lines += [(f"bucket {key}", str([each.name for each in found.matrices])) for key, found in of_own.items()]
        lines += [(op.name, "") for op in ops if op.group and op.key in of_own]  # In this order.
        require_equal(lines, axes, "the plan of ParallelMuon")


def _elementwise(parameters: Sequence[RoutedParameter]) -> list[tuple[ParamGroup, list[Tensor]]]:
    """The parameters that are no matrices, by their param groups."""
    found: dict[int, tuple[ParamGroup, list[Tensor]]] = {}
    for each in parameters:
        if each.route.algorithm == "adamw":
            found.setdefault(id(each.group), (each.group, []))[1].append(each.tensor)
    return list(found.values())


def require_equal_parameters(
    parameters: Sequence[RoutedParameter], meshes: Sequence[MeshMembers], settings: str, without_state: Set[Tensor]
) -> None:
    """Raise on all ranks if parameters or settings differ, or only some have state. Collective over ``meshes``."""
    of_tensor: dict[Tensor, RoutedParameter] = {each.tensor: each for each in parameters}

    def lines_of(members: MeshMembers) -> list[tuple[str, str]]:
        lines: list[tuple[str, str]] = []
        firsts: dict[int, RoutedParameter] = {}
        for each in map(of_tensor.__getitem__, members.tensors):
            tensor, route = each.tensor, each.route
            first = firsts.setdefault(id(each.group), each)
            _, placements = each.layout.mesh_and_placements(tensor)
            text = f"{tuple(tensor.shape)} {tensor.dtype} {placements} {route.kind} {route.splits} {route.split_dim}"
            text = f"{text} transposed={route.is_transposed} trainable={tensor.requires_grad}"
            text = f"{text} state={'zeros' if tensor in without_state else 'kept'}"
            lines.append((route.name, f"{text}, in the group of {first.route.name}"))
        for first in firsts.values():
            values = compared(first.group)
            lines += [(f"{key} of the group of {first.route.name}", repr(value)) for key, value in values.items()]
        return lines

    # Compare the list of meshes on each mesh, smaller ones first, so that a missing mesh raises and does not hang.
    sizes = [members.axes.size for members in meshes if members.axes.group is not None]
    common = [("settings", settings), ("meshes of", f"{sizes} ranks")]
    # Tensors of one process may be copies of one parameter, as FSDP2 leaves 0-d ones, and ranks may have others.
    local = [tensor for members in meshes if members.mesh is None for tensor in members.tensors]
    lost = [of_tensor[tensor].route.name for tensor in local if tensor in without_state]
    common.append(("local parameters without state", "all" if len(lost) == len(local) else str(lost)))
    own = {id(members.axes): [*lines_of(members), *common] for members in meshes}
    what = "the list of parameters and hyper-parameters of ParallelMuon"
    advice = (
        "Build the model, and load state, alike on every rank. Learning rates differ if a scheduler follows a metric "
        "that does: log it with sync_dist=True."
    )
    groups = [members.axes for members in meshes]
    together(lambda: None, groups, lambda _, ranks: require_equal(own[id(ranks)], ranks, what, advice))
