"""Layouts: on which ranks the parts of a parameter lie, and which box of it each rank holds."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lightning_muon.comm.groups import ALONE, AxisGroup, axis_group, host_group
from lightning_muon.compat.torch import (
    fsdp_units_of,
    has_unfinished_backward,
    is_in_backward,
    local_shape_and_offset,
)
from lightning_muon.params.routing import Route


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor: ``start[d] <= index < stop[d]`` in every dimension."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Size in every dimension."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box:
        """Common part; an empty one has ``numel == 0``."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(max, start, map(min, self.stop, other.stop)))
        return Box(start, stop)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of this box in the whole tensor."""
        return tuple(map(slice, self.start, self.stop))

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Index of this box in a tensor that holds just ``outer``."""
        return tuple(
            slice(start - origin, stop - origin)
            for start, stop, origin in zip(self.start, self.stop, outer.start, strict=True)
        )


@dataclass(frozen=True)
class OwnedBy:
    """A further placement: all of a tensor lies on one rank of a mesh axis, the others hold nothing."""

    rank: int


@dataclass(frozen=True)
class Decoupled:
    """A further placement: the tensor is equal on all ranks of a mesh axis, but each has gradients of its own."""


AxisPlacement = Placement | OwnedBy | Decoupled
_COPIES = Replicate | Decoupled


class PlacedState(NamedTuple):
    """A state of a parameter, laid out like it, or like its neurons."""

    parameter: Tensor
    state: Tensor
    shape: tuple[int, ...]  # Shape of the whole state.
    of_neurons: tuple[int, ...] | None = None  # The dimensions of the parameter that it has, if it is like the neurons.


class Layout:
    """Where the parts of parameters and gradients lie; an optimizer asks it, and reports the phases of a step to it.

    This class serves DTensors and plain tensors, which have that information; subclasses add more. A parameter is
    always given as the tensor that its module holds.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        """Plain tensors are replicated on ``mesh`` with equal gradients, or local to their process without it."""
        self._mesh = mesh
        self._fsdp_units: Sequence[FSDPModule] = ()  # One unit of each model.

    def mesh_and_placements(self, parameter: Tensor) -> tuple[DeviceMesh | None, tuple[AxisPlacement, ...]]:
        """Mesh, and one placement for each of its axes; ``None`` and ``()`` for a tensor of this process alone."""
        if isinstance(parameter, DTensor):
            return parameter.device_mesh, tuple(parameter.placements)
        return self._mesh, (Replicate(),) * (self._mesh.ndim if self._mesh is not None else 0)

    def local(self, parameter: Tensor) -> Tensor:
        """The part of the parameter that the calling rank updates. Shares memory."""
        return local_tensor(parameter)

    def dtype(self, parameter: Tensor) -> torch.dtype:
        """Dtype of :meth:`local` while a parameter trains, and of its gradient and state."""
        return parameter.dtype

    def has_gradient(self, parameter: Tensor) -> bool:
        """Whether :meth:`gradient` is a tensor; does not wait."""
        return parameter.grad is not None

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Gradient of :meth:`local`, in its shape; waits until it is there. Shares memory."""
        return None if parameter.grad is None else local_tensor(parameter.grad)

    def forget(self, parameters: Collection[Tensor]) -> None:
        """Drop the gradients of these parameters; local."""

    def begin_step(self, parameters: Collection[Tensor]) -> None:
        """Called before these parameters, the same on all ranks, are updated; the step can no longer be given up."""

    def updated(self, parameters: Collection[Tensor]) -> None:
        """Called when these have their new values, in the same order on all ranks."""

    def end_step(self) -> None:
        """Called when all parameters of :meth:`begin_step` are updated."""

    def watch(self, parameters: Collection[Tensor]) -> None:
        """Take the parameters of a new plan for :meth:`backward_has_failed`. Local."""
        self._fsdp_units = fsdp_units_of(parameters)

    def backward_has_failed(self) -> bool:
        """Whether an exception has left FSDP2 in the middle of a backward pass, and it was not reset; local."""
        return not is_in_backward() and any(map(has_unfinished_backward, self._fsdp_units))

    def zeros_like(self, parameter: Tensor) -> Tensor:
        """Zeros laid out like the parameter: optimizer state."""
        return torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def zeros_of_neurons(self, parameter: Tensor, shape: tuple[int, ...], kept: Collection[int]) -> Tensor:
        """Optimizer state with a value for each neuron of a parameter: float32 zeros, laid out like the neurons.

        ``shape`` has as many dimensions as the parameter, and its sizes in the dimensions that are ``kept``.
        """
        own = self.local(parameter)
        sizes = [own.shape[dim] if dim in kept else size for dim, size in enumerate(shape)]
        local = torch.zeros(sizes, dtype=torch.float32, device=own.device)
        if not isinstance(parameter, DTensor):
            return local
        placements = [each if getattr(each, "dim", None) in kept else Replicate() for each in parameter.placements]
        mesh, size, stride = parameter.device_mesh, torch.Size(shape), contiguous_stride(shape)
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=size, stride=stride)

    def saved(self, states: Sequence[PlacedState]) -> list[Tensor]:
        """Return states as a checkpoint has them: DTensors or whole tensors.

        Collective over the mesh of the parameters.
        """
        return [each.state for each in states]

    def loaded(self, states: Sequence[PlacedState]) -> list[Tensor]:
        """Inverse of :meth:`saved`; takes whole tensors as well. Collective as it is."""
        result: list[Tensor] = []
        for parameter, state, shape, of_neurons in states:
            if isinstance(parameter, DTensor) and state.ndim and not isinstance(state, DTensor):
                like: Any = parameter if of_neurons is None else self.zeros_of_neurons(parameter, shape, of_neurons)
                state = divided_as(state, like)
            result.append(state)
        return result


@dataclass(frozen=True, eq=False)
class RoutedParameter:
    """A parameter, its param group, its route, and where it lives."""

    tensor: nn.Parameter
    group: dict[str, Any]
    route: Route
    layout: Layout


@dataclass(frozen=True, eq=False)
class MeshMembers:
    """Parameters that live on one mesh (``None``: local tensors, or those of a plan without processes)."""

    mesh: DeviceMesh | None
    axes: AxisGroup  # The group over all of its axes.
    host: AxisGroup  # The same ranks, for tensors in host memory, so that communication does not wait for a device.
    tensors: tuple[Tensor, ...]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes of the mesh; empty for tensors of one process alone."""
        return tuple(1 + max(indices) for indices in zip(*self.axes.coordinates, strict=True))

    def along(self, mesh_axes: tuple[int, ...]) -> AxisGroup:
        """The ranks that differ from this one along these axes. Collective over the mesh the first time."""
        if self.mesh is not None:
            return axis_group(self.mesh, mesh_axes)
        own, every = self.axes.coordinates[self.axes.rank], self.axes.coordinates
        fixed = [axis for axis in range(len(own)) if axis not in mesh_axes]
        found = tuple(each for each in every if all(each[axis] == own[axis] for axis in fixed))
        return AxisGroup(None, found.index(own), found)


def group_by_mesh(tensors: Sequence[Tensor], layout: Layout) -> tuple[MeshMembers, ...]:
    """Parameters by mesh, the smallest first. Collective over each mesh the first time."""
    found: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(layout.mesh_and_placements(tensor)[0], []).append(tensor)
    groups: list[MeshMembers] = []
    for mesh, members in found.items():
        axes = ALONE if mesh is None else axis_group(mesh, tuple(range(mesh.ndim)))
        host = axes if mesh is None or mesh.device_type == "cpu" else host_group(axes)
        groups.append(MeshMembers(mesh, axes, host, tuple(members)))
    return tuple(sorted(groups, key=lambda group: group.axes.size))


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


def local_tensor(tensor: Tensor) -> Tensor:
    """The calling rank's part of a DTensor, or the tensor itself. Shares memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_part_of(whole: Tensor, like: DTensor) -> Tensor:
    """The part of ``whole`` that the calling rank holds if it is laid out as ``like``; shares memory."""
    mesh = like.device_mesh
    place = tuple(mesh.get_coordinate() or ())
    (box,) = held_boxes(tuple(whole.shape), tuple(mesh.shape), tuple(like.placements), [place])
    return whole[box.slices]


def divided_as(whole: Tensor, like: DTensor) -> DTensor:
    """A copy of :func:`own_part_of`, laid out as ``like``. Local."""
    part = own_part_of(whole, like).to(like.device, copy=True)
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """All parameters of the param groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def replicated_axes(mesh: DeviceMesh, placements: Sequence[AxisPlacement]) -> tuple[int, ...]:
    """Indices of the mesh axes, of more than one rank, whose ranks hold equal parts of a tensor."""
    return tuple(axis for axis, each in enumerate(placements) if isinstance(each, Replicate) and mesh.size(axis) > 1)


def sharded_axes(placements: Sequence[AxisPlacement], mesh_shape: Sequence[int], name: str) -> tuple[int, ...]:
    """Indices of the mesh axes, of more than one rank, over which a tensor is sharded."""
    for placement in placements:
        if not isinstance(placement, Shard | OwnedBy | _COPIES) and not hasattr(placement, "split_factor"):
            raise ValueError(f"{name} has the placement {placement}: ParallelMuon takes Shard and Replicate only")
    return tuple(
        axis for axis, placement in enumerate(placements) if not isinstance(placement, _COPIES) and mesh_shape[axis] > 1
    )


def held_boxes(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: Sequence[AxisPlacement],
    coordinates: Sequence[tuple[int, ...]],
) -> tuple[Box, ...]:
    """Boxes of the parameter that the ranks at the mesh ``coordinates`` hold, which may be uneven or empty."""
    axes = [axis for axis, placement in enumerate(placements) if not isinstance(placement, _COPIES)]
    sizes, divided = [mesh_shape[axis] for axis in axes], [placements[axis] for axis in axes]
    places = [tuple(coordinate[axis] for axis in axes) for coordinate in coordinates]
    found = {place: _held_box(shape, sizes, divided, place) for place in set(places)}
    return tuple(found[place] for place in places)


def _held_box(
    shape: tuple[int, ...], mesh_shape: Sequence[int], placements: Sequence[AxisPlacement], coordinate: Sequence[int]
) -> Box:
    """The box at a coordinate of the axes that shard the parameter."""
    if any(isinstance(each, OwnedBy) and each.rank != i for each, i in zip(placements, coordinate, strict=True)):
        return Box((0,) * len(shape), (0,) * len(shape))
    if len(placements) == 1 and type(placements[0]) is Shard:
        # As torch.chunk divides a dimension, without the 25 microseconds of asking torch.
        dim = placements[0].dim
        length = -(-shape[dim] // mesh_shape[0])
        start, stop = (min(index * length, shape[dim]) for index in (coordinate[0], coordinate[0] + 1))
        return Box((0,) * dim + (start,) + (0,) * (len(shape) - dim - 1), (*shape[:dim], stop, *shape[dim + 1 :]))
    divided = [Replicate() if isinstance(placement, OwnedBy) else placement for placement in placements]
    local_shape, offset = local_shape_and_offset(shape, mesh_shape, coordinate, divided)
    return Box(offset, tuple(map(int.__add__, offset, local_shape)))
