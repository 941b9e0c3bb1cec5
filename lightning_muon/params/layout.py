"""Layouts: on which ranks the parts of a parameter lie, which box of it each rank holds, and the matrices in it."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, combinations, pairwise, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lightning_muon.comm.collectives import ALONE, AxisGroup, axis_group, host_group
from lightning_muon.compat.torch import (
    fsdp_units_of,
    has_unfinished_backward,
    is_in_backward,
    local_shape_and_offset,
)
from lightning_muon.math.newton_schulz import Arithmetic, NewtonSchulz, NewtonSchulzOptions
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
        # Whether gradients that must be summed over ranks are; a sharding mode that sums them knows it.
        self.has_sums: Callable[[], bool] = lambda: True

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
            if isinstance(state, DTensor) and not isinstance(parameter, DTensor):
                state = state.full_tensor()
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


Held = Mapping[int, Mapping[int, int]]
"""Replica -> its ranks with elements of a matrix -> how many."""


class ShardBoxes:
    """The boxes of one tensor, of at least one dimension, on the ranks of a group; they may be empty or overlap.

    The ranks of one replica hold the whole tensor together. By default all ranks are one replica.
    """

    def __init__(self, boxes: Sequence[Box], replica_of: Sequence[int] | None = None) -> None:
        self.boxes = tuple(boxes)
        self.replica_of = (0,) * len(boxes) if replica_of is None else tuple(replica_of)
        filled = [(rank, box) for rank, box in enumerate(boxes) if box.numel]
        # Along the dimension with most cuts, so that few boxes have to be looked at.
        extents = [{(box.start[dim], box.stop[dim]) for _, box in filled} for dim in range(len(boxes[0].start))]
        self._dim = max(range(len(extents)), key=lambda dim: len(extents[dim]))
        self._uncut = {dim: next(iter(found)) for dim, found in enumerate(extents) if len(found) == 1}
        self._filled = sorted(filled, key=lambda item: item[1].start[self._dim])
        self._starts = [box.start[self._dim] for _, box in self._filled]
        # The largest stop of each box and all before it.
        self._last_stops = list(accumulate((box.stop[self._dim] for _, box in self._filled), max))
        self._pieces: dict[Box, dict[int, Box]] = {}
        self._held: dict[tuple[object, ...], Held] = {}

    def pieces(self, box: Box) -> Mapping[int, Box]:
        """Rank -> its part of ``box``, by rank; ranks without elements of it are left out."""
        if box not in self._pieces:
            first = bisect_right(self._last_stops, box.start[self._dim])
            stop = bisect_left(self._starts, box.stop[self._dim])
            found = {rank: held.intersect(box) for rank, held in self._filled[first:stop]}
            self._pieces[box] = {rank: found[rank] for rank in sorted(found) if found[rank].numel}
        return self._pieces[box]

    def held(self, box: Box) -> Held:
        """How many elements of ``box`` each rank holds; one object for all boxes that lie alike.

        Raises a ``ValueError`` if they do not make up the box.
        """
        pattern = self._pattern(box)
        if pattern not in self._held:
            pieces, held = self.pieces(box), dict[int, dict[int, int]]()
            for rank, piece in pieces.items():
                held.setdefault(self.replica_of[rank], {})[rank] = piece.numel
            replica = [pieces[rank] for rank in next(iter(held.values()), ())]
            if not tile(replica, box):
                raise ValueError(f"no contiguous parts that make up the whole: {replica[:4]}")
            self._held[pattern] = held
        return self._held[pattern]

    def _pattern(self, box: Box) -> tuple[object, ...]:
        """Key that is equal for boxes that lie alike on the ranks, such as experts of a stack that is cut by rows."""
        places: list[object] = []
        for dim, (start, stop) in enumerate(zip(box.start, box.stop, strict=True)):
            first, last = self._uncut.get(dim, (stop, start))
            places.append(stop - start if first <= start and stop <= last else (start, stop))
        return tuple(places)


@dataclass(eq=False)
class Matrix:
    """A matrix of a parameter, read as ``rows x cols`` in row-major order; on the ranks of an exchange group."""

    parameter: RoutedParameter
    box: Box  # Where it is in the parameter.
    rows: int
    cols: int
    number: int  # Among the matrices of its parameter.
    shards: ShardBoxes  # Parts of its parameter on the ranks.
    rank: int  # The calling one.
    flops: int  # Cost of Newton-Schulz.
    owner: int = -1  # The rank that orthogonalizes it. The planner sets it.

    @property
    def name(self) -> str:
        """Name of its parameter, and which matrix of it."""
        route = self.parameter.route
        if route.kind == "stack":
            return f"{route.name}{list(self.box.start[:-2])}"
        return f"{route.name}[{self.number}]" if len(route.splits) > 1 else route.name

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.cols

    @property
    def is_transposed(self) -> bool:
        """Whether the columns are the outputs of the layer."""
        return self.parameter.route.is_transposed

    def newton_schulz(self, arithmetic: Arithmetic) -> NewtonSchulz:
        """How it is orthogonalized, by the current options of its param group."""
        return NewtonSchulzOptions.of(self.parameter.group).choice(self.rows, self.cols, arithmetic)

    @cached_property
    def held(self) -> Held:
        """How many of its elements each rank holds; matrices that lie alike share one object."""
        try:
            return self.shards.held(self.box)
        except ValueError as error:
            raise ValueError(
                f"the shards of {self.name} are {error}; ParallelMuon does not take this order of sharding"
            ) from None

    @cached_property
    def sole_holder(self) -> int | None:
        """The rank that holds all elements while no other has any."""
        ranks = [rank for replica in self.held.values() for rank in replica]
        return ranks[0] if len(ranks) == 1 else None

    @cached_property
    def pieces(self) -> Mapping[int, Box]:
        """Rank -> its part of the parameter, by rank; ranks without elements are left out."""
        return self.shards.pieces(self.box)

    @cached_property
    def _slices(self) -> tuple[slice, ...] | None:
        """The calling rank's part in its local tensor; ``None`` if that is all of it."""
        local, mine = self.shards.boxes[self.rank], self.pieces[self.rank]
        return None if mine == local else mine.slices_in(local)

    def local_view(self, local: Tensor) -> Tensor:
        """The calling rank's piece, which must have elements, in its local tensor: parameter, gradient or momentum."""
        return local if self._slices is None else local[self._slices]

    @cached_property
    def _parts(self) -> tuple[list[Box], tuple[int, tuple[int, ...]] | None]:
        """The different pieces, in order of their starts, and the ``Tensor.split`` that makes them, if there is one."""
        parts = sorted(set(self.pieces.values()), key=lambda part: part.start)
        return parts, cut_of(parts)

    def views(self, whole: Tensor) -> dict[tuple[int, ...], Tensor]:
        """The piece of every rank in a tensor that holds just the matrix; by the start of its box."""
        parts, cut = self._parts
        if cut is None:
            views = [whole[part.slices_in(self.box)] for part in parts]
        else:
            dim, sizes = cut
            views = whole.split(sizes, dim)  # Makes hundreds of views in the time of a few slices.
        return dict(zip((part.start for part in parts), views, strict=True))

    @property
    def num_neurons(self) -> int:
        """Number of outputs of the layer that the matrix has."""
        return self.cols if self.is_transposed else self.rows

    @property
    def neuron_box(self) -> Box:
        """The values of its neurons in a tensor of :func:`neuron_shape`."""
        route, start, stop = self.parameter.route, list(self.box.start), list(self.box.stop)
        kept = neuron_dims(tuple(self.parameter.tensor.shape), route)
        for dim in (dim for dim in range(len(start)) if dim not in kept):
            start[dim] = self.number if route.splits and dim == route.split_dim else 0
            stop[dim] = start[dim] + 1
        return Box(tuple(start), tuple(stop))


def neuron_dims(shape: tuple[int, ...], route: Route) -> tuple[int, ...]:
    """Dimensions of a parameter that count neurons (outputs of its layer), or in a stack also matrices."""
    every = range(len(shape))
    if route.kind == "stack":
        return tuple(every[:-2]) + ((every[-1],) if route.is_transposed else (every[-2],))
    return tuple(every[1:]) if route.is_transposed else (0,)


def neuron_shape(shape: tuple[int, ...], route: Route) -> tuple[int, ...]:
    """Shape of a tensor with a value for each neuron of each matrix of a parameter, in as many dimensions."""
    kept = neuron_dims(shape, route)
    parts = {route.split_dim: len(route.splits)} if route.splits else {}
    return tuple(size if dim in kept else parts.get(dim, 1) for dim, size in enumerate(shape))


def matrices_in(shape: tuple[int, ...], route: Route) -> list[tuple[Box, int, int]]:
    """Box, rows and columns of each matrix in a parameter of global ``shape``: its fused parts, or those of a stack."""
    if route.kind == "elementwise" or 0 in shape:
        return []
    if route.kind == "stack":
        *leading, rows, cols = shape
        places = product(*map(range, leading))
        return [(Box((*i, 0, 0), (*(each + 1 for each in i), rows, cols)), rows, cols) for i in places]
    dim, sizes = route.split_dim, route.splits or (shape[route.split_dim],)
    boxes = [
        Box((0,) * dim + (start,) + (0,) * (len(shape) - dim - 1), (*shape[:dim], stop, *shape[dim + 1 :]))
        for start, stop in pairwise(accumulate(sizes, initial=0))
    ]
    return [(box, box.shape[0], box.numel // box.shape[0]) for box in boxes]


def tile(parts: Sequence[Box], box: Box) -> bool:
    """Whether ``parts`` make up ``box`` without overlap; empty parts do not count."""
    filled = [part for part in parts if part.numel]
    if sum(part.numel for part in filled) != box.numel or len(set(filled)) != len(filled):
        return False
    return cut_of(filled) is not None or not any(one.intersect(other).numel for one, other in combinations(filled, 2))


def cut_of(parts: Iterable[Box]) -> tuple[int, tuple[int, ...]] | None:
    """Arguments (dimension, sizes) of ``Tensor.split`` if it makes the different ``parts``; else ``None``."""
    ordered = sorted(set(parts), key=lambda part: part.start)
    cut = [dim for dim in range(len(ordered[0].start)) if len({(p.start[dim], p.stop[dim]) for p in ordered}) > 1]
    dim = cut[0] if cut else 0
    if len(cut) > 1 or any(one.stop[dim] != other.start[dim] for one, other in pairwise(ordered)):
        return None
    return dim, tuple(part.shape[dim] for part in ordered)
