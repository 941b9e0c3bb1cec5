"""Which rank updates which part of a weight with ZeRO-2, and float32 copies of the parts of 16-bit weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_muon.comm.collectives import ALONE, axis_group, own_group
from lightning_muon.compat import foreach
from lightning_muon.compat.torch import ModuleHook
from lightning_muon.params.layout import (
    AxisPlacement,
    Box,
    OwnedBy,
    PlacedState,
    contiguous_stride,
    held_boxes,
    local_tensor,
)
from lightning_muon.schedule.exchange import longest_first
from lightning_muon.sharding.base import JOINS_STATE_DICTS, mesh_device


def place_shards(
    parameters: Sequence[Tensor], whole: Mapping[Tensor, int], num_ranks: int
) -> dict[Tensor, AxisPlacement]:
    """The placement of each parameter on an axis of ``num_ranks`` ranks; a pure function, equal on every rank.

    ``whole`` has the FLOPs of the parameters that one rank must own; owners are chosen so that ranks have equal FLOPs.
    The others are divided by rows, or updated by every rank where they have no dimensions or elements.
    """
    costs = [whole.get(parameter, 0) for parameter in parameters]
    sizes = [parameter.nbytes for parameter in parameters]
    taken = [index for index, parameter in enumerate(parameters) if parameter in whole]
    owners = longest_first(costs, sizes, [(0, 0)] * num_ranks, taken=taken)
    placements: dict[Tensor, AxisPlacement] = {}
    for index, parameter in enumerate(parameters):
        if parameter.ndim == 0 or parameter.numel() == 0:
            placements[parameter] = Replicate()
        else:
            placements[parameter] = OwnedBy(owners[index]) if index in owners else Shard(0)
    return placements


class ShardMap:
    """The parts of plain, contiguous parameters that the ranks of the shard axis, the last one of the mesh, update.

    Every part is one range of rows. Replicas (the first axis of a 2-D mesh) have the same parts. The process groups
    are used by nothing else, so that hooks may communicate. Collective over the axes of the mesh to construct.
    """

    def __init__(self, mesh: DeviceMesh, placements: Mapping[Tensor, AxisPlacement]) -> None:
        self.mesh = mesh
        self.shard = own_group(axis_group(mesh, (mesh.ndim - 1,)))
        self.replicate = own_group(axis_group(mesh, (0,))) if mesh.ndim > 1 else ALONE
        self._placements = dict(placements)
        # Parameter -> the part of each rank of the shard axis.
        self.boxes = {
            parameter: boxes_on_axis(tuple(parameter.shape), placement, self.shard.size)
            for parameter, placement in placements.items()
        }
        self._views: dict[Tensor, tuple[int, Tensor]] = {}
        # Work that follows a communication runs on a stream of its own, before products, so backward does not wait.
        self.side_stream = cache(lambda device: torch.cuda.Stream(device, -1) if device.type == "cuda" else None)

    def placements(self, parameter: Tensor) -> tuple[AxisPlacement, ...]:
        """One placement per axis of the mesh."""
        return (*(Replicate() for _ in range(self.mesh.ndim - 1)), self._placements[parameter])

    def is_sharded(self, parameter: Tensor) -> bool:
        """Whether each element is updated by one rank of the shard axis only."""
        return not isinstance(self._placements[parameter], Replicate)

    def local(self, parameter: Tensor, whole: Tensor | None = None) -> Tensor:
        """The calling rank's part of ``parameter``, or of ``whole``, a tensor like it. Shares memory."""
        if whole is not None:
            return self._part(parameter, whole)
        address, view = self._views.get(parameter, (0, parameter))
        if address != parameter.data_ptr():
            view = self._part(parameter, parameter)
            self._views[parameter] = parameter.data_ptr(), view
        return view

    def owner(self, parameter: Tensor) -> int | None:
        """The rank of the shard axis that has all of the parameter, if one has."""
        placement = self._placements[parameter]
        return placement.rank if isinstance(placement, OwnedBy) else None

    def laid_out(self, parameter: Tensor, part: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The calling rank's part of a state of this whole ``shape``: of a DTensor where it is some rows."""
        return self._as_rows(part, shape) if isinstance(self._placements[parameter], Shard) else part

    def saved(self, states: Sequence[PlacedState]) -> list[Tensor]:
        """States, or parts of the calling rank, as DTensors sharded by rows. Collective over the shard axis."""
        result: list[Tensor] = []
        for parameter, state, shape, _ in states:
            if self.owner(parameter) is not None:
                state = self._as_rows(self._rows_of_owner(parameter, state, shape), shape)
            elif not isinstance(state, DTensor):
                state = self.laid_out(parameter, state, shape)
            result.append(state)
        return result

    def loaded(self, states: Sequence[PlacedState]) -> list[Tensor]:
        """The inverse of :meth:`saved`; takes whole tensors as well. Collective over the shard axis."""
        result: list[Tensor] = []
        for parameter, state, shape, _ in states:
            whole = state
            if isinstance(state, DTensor) and self.owner(parameter) is not None:
                # One at a time: whole tensors take the memory that sharding saves.
                whole = state.to(parameter.device).full_tensor()  # type: ignore[attr-defined]
            if not isinstance(whole, DTensor):
                part = self.local(parameter, whole.contiguous()).to(state.device, copy=True)
                whole = self.laid_out(parameter, part, shape)
            result.append(whole)
        return result

    def _rows_of_owner(self, parameter: Tensor, state: Tensor, shape: tuple[int, ...]) -> Tensor:
        """This rank's rows of the owner's state. Collective over the shard axis."""
        group, owner, device = self.shard, self.owner(parameter), mesh_device(self.mesh)
        box = boxes_on_axis(shape, Shard(0), group.size)[group.rank]
        # A state that is kept on the host is sent from device to device, too.
        own = state if group.rank == owner else torch.empty(shape, dtype=state.dtype, device=device)
        whole = own.to(device).contiguous()
        if group.group is not None:
            dist.broadcast(whole, group=group.group, group_src=owner)
        return whole[box.start[0] : box.stop[0]].to(state.device, copy=True)

    def _as_rows(self, local: Tensor, shape: tuple[int, ...]) -> DTensor:
        rows = (*(Replicate() for _ in range(self.mesh.ndim - 1)), Shard(0))
        size, stride = torch.Size(shape), contiguous_stride(shape)
        return DTensor.from_local(local, self.mesh, rows, run_check=False, shape=size, stride=stride)

    def _part(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        box = self.boxes[parameter][self.shard.rank]
        return tensor.detach()[tuple(map(slice, box.start, box.stop))]


@lru_cache(maxsize=1 << 12)
def boxes_on_axis(shape: tuple[int, ...], placement: AxisPlacement, size: int) -> tuple[Box, ...]:
    """The part of each rank of an axis of ``size``, as a box."""
    return held_boxes(shape, (size,), (placement,), [(rank,) for rank in range(size)])


def main_dtype(weight: Tensor) -> torch.dtype:
    """The dtype in which a weight is updated: of 32 bits at least."""
    return torch.promote_types(weight.dtype, torch.float32) if weight.is_floating_point() else weight.dtype


def has_main(weight: Tensor) -> bool:
    """Whether a weight is the rounding of what is updated."""
    return main_dtype(weight) != weight.dtype


class MainWeights:
    """Float32 copies of a module's 16-bit weights, of which each rank has the parts that it updates.

    The weights of the module are their roundings; a copy follows what the program writes there. The copies stay when a
    training ends, so that the module can be saved, and trained again on the same ranks.
    """

    _shards: ShardMap  # Since the first call of `divide`.

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._parts: dict[Tensor, Tensor] = {}  # Equal keys on all ranks.
        self._hooks = ExitStack()

    @classmethod
    def of(cls, module: nn.Module, mesh: DeviceMesh) -> MainWeights:
        """Those that an earlier training on these ranks has left, or new ones; local."""
        known = _KNOWN.pop(module, None)
        if known is not None:
            known._hooks.close()
        if known is None or known._mesh != mesh:
            known = cls(mesh)
        _KNOWN[module] = known
        held = set(module.parameters())  # Modules may have been replaced since.
        known._parts = {weight: part for weight, part in known._parts.items() if weight in held}
        for child in (each for each in module.modules() if any(map(has_main, each.parameters(recurse=False)))):
            known._hooks.enter_context(child.register_state_dict_post_hook(ModuleHook(known._save, "nothing")))
            known._hooks.enter_context(child.register_load_state_dict_pre_hook(ModuleHook(known._load, "nothing")))
        return known

    def divide(self, shards: ShardMap) -> None:
        """Let each rank have the parts that ``shards`` say. Collective over the mesh."""
        weights = list(filter(has_main, self._parts))
        placed = [PlacedState(*each, tuple(each[0].shape)) for each in zip(weights, self._saved(weights), strict=True)]
        self._shards = shards
        self._parts = dict(zip(weights, map(local_tensor, shards.loaded(placed)), strict=True))
        for weight in weights:
            _sum_gradients_in(weight, main_dtype(weight))

    def part(self, weight: Tensor) -> Tensor | None:
        """What the calling rank updates of a weight that has a copy."""
        return self._parts.get(weight)

    @torch.no_grad()
    def follow(self, weights: Iterable[Tensor]) -> None:
        """Take weights that are no roundings of their copies; those without a copy get one. Local."""
        for weight in filter(has_main, weights):
            if weight in self._parts:
                self._parts[weight].copy_(self._exact(weight))
            else:
                self._parts[weight] = self._exact(weight)
                _sum_gradients_in(weight, main_dtype(weight))

    @torch.no_grad()
    def round(self, weights: Iterable[Tensor]) -> None:
        """Write the rounded parts of the calling rank into these weights; local."""
        if pairs := [(self._shards.local(each), self._parts[each]) for each in weights if each in self._parts]:
            foreach.copy_([own for own, _ in pairs], [part for _, part in pairs])

    def close(self) -> None:
        """End the training; local."""
        for weight in self._parts:
            _sum_gradients_in(weight, weight.dtype)

    def _saved(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Main weights as a checkpoint has them. Collective over the mesh."""
        placed: list[PlacedState] = []
        for weight in weights:
            exact, part = self._exact(weight), self._parts.get(weight)
            # The part itself needs no memory.
            exact = part if part is not None and torch.equal(part, exact) else exact
            placed.append(PlacedState(weight, exact, tuple(weight.shape)))
        return self._shards.saved(placed) if placed else []

    def _exact(self, weight: Tensor) -> Tensor:
        """The calling rank's part as it is where the weight is its rounding, elsewhere the weight."""
        own, part = self._shards.local(weight), self._parts.get(weight)
        if part is None:
            return own.to(main_dtype(weight))
        own = own.to(part.device)
        return torch.where(part.to(own.dtype) == own, part, own)

    def _save(self, child: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        held = {prefix + name: each for name, each in child._parameters.items() if each is not None and has_main(each)}
        held = {name: each for name, each in held.items() if name in state and JOINS_STATE_DICTS.get()}
        state.update(zip(held, self._saved(list(held.values())), strict=True))

    @torch.no_grad()
    def _load(self, child: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, weight in child._parameters.items():
            value = state.get(prefix + name)
            if weight is None or not has_main(weight) or not isinstance(value, Tensor) or value.shape != weight.shape:
                continue
            value = state[prefix + name] = value.full_tensor() if isinstance(value, DTensor) else value
            if value.dtype == weight.dtype:
                continue  # The copy will follow the weight.
            if weight in self._parts:
                self._parts[weight].copy_(self._shards.local(weight, value))
            elif not torch.equal(value.to(weight.dtype).to(value.dtype), value):
                own = self._shards.local(weight, value)
                self._parts[weight] = own.to(weight.device, main_dtype(weight), copy=True)


def _sum_gradients_in(weight: Tensor, dtype: torch.dtype) -> None:
    """Let backward sum gradients of micro-batches in ``dtype``: in 16 bits small ones would be lost. Local."""
    gradient, weight.grad = weight.grad, None
    weight.grad_dtype = dtype
    weight.grad = None if gradient is None else gradient.to(dtype)


_KNOWN = WeakKeyDictionary[nn.Module, MainWeights]()
