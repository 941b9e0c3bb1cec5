"""Where the parts of a parameter lie: on which ranks, and which box of it each rank holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from typing_extensions import override

from lightning_muon.compat.torch import (
    drop_unreduced_gradients_of,
    fsdp_units_of,
    has_unfinished_backward,
    holds_all_of,
    is_in_backward,
    local_shape_and_offset,
)
from lightning_muon.params.logical import Box
from lightning_muon.schedule.program import Op
from lightning_muon.schedule.step import NOTHING_ADDED, AddedOps


@dataclass(frozen=True)
class OwnedBy:
    """A placement beside those of torch: all of a tensor lies on one rank of a mesh axis, the others hold nothing."""

    rank: int


@dataclass(frozen=True)
class Decoupled:
    """A placement beside those of torch: equal on all ranks of a mesh axis, while each has gradients of its own."""


AxisPlacement = Placement | OwnedBy | Decoupled
_COPIES = Replicate | Decoupled


def _no_facts(parameters: Collection[Tensor]) -> Mapping[str, Collection[str]]:
    """No op has a condition."""
    del parameters
    return {}


@dataclass(frozen=True, kw_only=True)
class StepPart:
    """What is in the program of a step beside matrices and AdamW."""

    ops: AddedOps = NOTHING_ADDED  # The ops, with keys of their own.
    # Kind of op -> runs one; returns the handles of the communication that it has started, if any.
    actions: Mapping[str, Callable[[Op], Sequence[Any]]] = field(
        default_factory=dict[str, Callable[[Op], Sequence[Any]]]
    )
    # Parameters that take part in a step -> the conditions of these ops.
    facts: Callable[[Collection[Tensor]], Mapping[str, Collection[str]]] = _no_facts


class Layout(Protocol):
    """Where the parts of parameters and their gradients lie; what an optimizer asks, and what it tells.

    A parameter is always named by the tensor that its module holds. The methods that are not abstract do what is right
    for gradients that no FSDP2 unit holds.

    Attributes:
        may_arrive_late: Whether ``arrives_late`` is ever true.
        arrives_late: Whether gradients may still be on their way, so that an optimizer should not ask for all of them
            before it begins. Equal on all ranks.
        agreed: Parameters that have a gradient on all ranks, if all ranks know that since they finished the gradients
            of this step. ``None`` if an optimizer has to ask; equal on all ranks.
    """

    may_arrive_late: bool = False
    arrives_late: bool
    agreed: Collection[Tensor] | None

    def mesh_and_placements(self, parameter: Tensor) -> tuple[DeviceMesh | None, tuple[AxisPlacement, ...]]:
        """Mesh, and one placement for each of its axes; ``None`` and nothing for a tensor of this process alone."""
        ...

    def local(self, parameter: Tensor) -> Tensor:
        """The part of the parameter that the calling rank updates. Shares memory."""
        ...

    def has_gradient(self, parameter: Tensor) -> bool:
        """Whether :meth:`gradient` is a tensor; does not wait."""
        ...

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Gradient of :meth:`local`, whose shape it has; waits until it is there. Shares memory."""
        ...

    def forget(self, parameters: Collection[Tensor]) -> None:
        """These gradients are not wanted any more; local."""

    def begin_step(self, parameters: Collection[Tensor]) -> None:
        """These parameters, the same on all ranks, will be updated."""

    def in_order(self, parameters: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
        """These parameters in the order in which their gradients arrive, those together that arrive together."""
        ...

    def updated(self, parameters: Collection[Tensor]) -> None:
        """The local parts of these have their new values."""

    def end_step(self) -> None:
        """All parameters of :meth:`begin_step` are updated."""

    def step_part(self, done: Mapping[str, Sequence[Tensor]]) -> StepPart:
        """What a step of these parameters does beside updating them.

        Args:
            done: The names of the ops of the step, those that update parameters in their order, and the parameters that
                have their new values after each.
        """
        del done
        return StepPart()

    def watch(self, parameters: Collection[Tensor]) -> None:
        """A plan was made for these; what follows is asked about them. Local."""

    def backward_has_failed(self) -> bool:
        """Whether an exception has ended a backward pass, so that gradients are missing until it is reset; local."""
        return False

    def holds_whole_models(self, parameters: Collection[Tensor]) -> bool:
        """Whether ``parameters`` are all that train of the models whose parameters are watched; local."""
        del parameters
        return False

    def forget_unreduced(self, parameters: Collection[Tensor]) -> None:
        """Gradients of these that no backward pass has reduced yet are not wanted any more; local."""

    def zeros_like(self, parameter: Tensor) -> Tensor:
        """Zeros laid out like the parameter: optimizer state."""
        ...

    def saved(self, states: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Pairs of parameter and state, as :meth:`zeros_like` makes it -> states as a checkpoint has them.

        DTensors in which each element is on some rank, or whole tensors. Collective over the mesh of the parameters.
        """
        ...

    def loaded(self, states: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Inverse of :meth:`saved`; takes whole tensors as well. Collective over the mesh of the parameters."""
        ...


class TensorLayout(Layout):
    """The layout of DTensors and of plain tensors, who know it themselves; nothing is to be done around a step.

    Args:
        mesh: Where plain tensors are replicated with equal gradients; without it they are local to their process.
    """

    arrives_late = False

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self._mesh = mesh
        self.agreed: Collection[Tensor] | None = None
        # One of each model.
        self._fsdp_units: Sequence[FSDPModule] = ()

    def watch(self, parameters: Collection[Tensor]) -> None:
        """As in :class:`Layout`."""
        self._fsdp_units = fsdp_units_of(parameters)

    def backward_has_failed(self) -> bool:
        """As in :class:`Layout`: FSDP2 is left in the middle of the pass."""
        return not is_in_backward() and any(map(has_unfinished_backward, self._fsdp_units))

    def holds_whole_models(self, parameters: Collection[Tensor]) -> bool:
        """As in :class:`Layout`."""
        return holds_all_of(self._fsdp_units, parameters)

    def forget_unreduced(self, parameters: Collection[Tensor]) -> None:
        """As in :class:`Layout`: FSDP2 keeps those of micro-batches at its whole weights."""
        drop_unreduced_gradients_of(parameters)

    @override
    def mesh_and_placements(self, parameter: Tensor) -> tuple[DeviceMesh | None, tuple[AxisPlacement, ...]]:
        if isinstance(parameter, DTensor):
            return parameter.device_mesh, tuple(parameter.placements)
        return self._mesh, (Replicate(),) * (self._mesh.ndim if self._mesh is not None else 0)

    @override
    def local(self, parameter: Tensor) -> Tensor:
        return local_tensor(parameter)

    @override
    def has_gradient(self, parameter: Tensor) -> bool:
        return parameter.grad is not None

    @override
    def gradient(self, parameter: Tensor) -> Tensor | None:
        return None if parameter.grad is None else local_tensor(parameter.grad)

    @override
    def begin_step(self, parameters: Collection[Tensor]) -> None:
        self.agreed = None

    @override
    def in_order(self, parameters: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
        return [parameters]

    @override
    def zeros_like(self, parameter: Tensor) -> Tensor:
        return torch.zeros_like(parameter, memory_format=torch.preserve_format)

    @override
    def saved(self, states: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        return [state for _, state in states]

    @override
    def loaded(self, states: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        return [state for _, state in states]


def local_tensor(tensor: Tensor) -> Tensor:
    """The calling rank's part of a DTensor, or the tensor itself. Shares memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_axes(placements: Sequence[AxisPlacement], mesh_shape: Sequence[int], name: str) -> tuple[int, ...]:
    """Indices of the mesh axes, of more than one rank, over which a tensor is divided."""
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
    """Box of the parameter that the rank at each of the mesh ``coordinates`` holds; uneven and empty ones included."""
    axes = [axis for axis, placement in enumerate(placements) if not isinstance(placement, _COPIES)]
    # Replicas hold the same, and asking torch takes 25 microseconds.
    found: dict[tuple[int, ...], Box] = {}
    boxes: list[Box] = []
    for coordinate in coordinates:
        place = tuple(coordinate[axis] for axis in axes)
        if place not in found:
            found[place] = _held_box(
                shape, [mesh_shape[axis] for axis in axes], [placements[axis] for axis in axes], place
            )
        boxes.append(found[place])
    return tuple(boxes)


def _held_box(
    shape: tuple[int, ...], mesh_shape: Sequence[int], placements: Sequence[AxisPlacement], coordinate: Sequence[int]
) -> Box:
    """The box at a coordinate of the axes that divide the parameter."""
    if any(
        isinstance(each, OwnedBy) and each.rank != index for each, index in zip(placements, coordinate, strict=True)
    ):
        return Box((0,) * len(shape), (0,) * len(shape))
    if len(placements) == 1 and type(placements[0]) is Shard:
        dim = placements[0].dim
        start, stop = _shard_of_dim(shape[dim], mesh_shape[0], coordinate[0])
        return Box((0,) * dim + (start,) + (0,) * (len(shape) - dim - 1), (*shape[:dim], stop, *shape[dim + 1 :]))
    divided = [Replicate() if isinstance(placement, OwnedBy) else placement for placement in placements]
    local_shape, offset = local_shape_and_offset(shape, mesh_shape, coordinate, divided)
    return Box(offset, tuple(map(int.__add__, offset, local_shape)))


@lru_cache(maxsize=1 << 16)
def _shard_of_dim(size: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """Which indices of a dimension a rank holds that is sharded over one axis: the same in parameters of any shape."""
    (length,), (start,) = local_shape_and_offset((size,), (num_ranks,), (rank,), (Shard(0),))
    return start, start + length
