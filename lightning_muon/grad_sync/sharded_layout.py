"""The layout of ZeRO-2 as an optimizer sees it: replicated parameters, sharded gradients and optimizer state.

State is whole on owners for the step, and in DTensors that are sharded by rows, as those of FSDP2, for checkpoints.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from typing_extensions import override

from lightning_muon.comm.agreement import fail_together, require_equal
from lightning_muon.grad_sync.parameter_all_gather import ParameterAllGather
from lightning_muon.grad_sync.shard_map import ShardMap, boxes_on_axis
from lightning_muon.grad_sync.transports import ReduceScatterToOwners
from lightning_muon.params.layout import AxisPlacement, Layout, OwnedBy, PlacedState, contiguous_stride


class ShardedLayout(Layout):
    """Tells an optimizer to update the calling rank's parts only, and sends them to the other ranks."""

    def __init__(
        self,
        shard_map: ShardMap,
        gradients: ReduceScatterToOwners,
        all_gather: ParameterAllGather,
    ) -> None:
        super().__init__(shard_map.mesh)
        self._updating: Collection[Tensor] = ()
        self._shard_map, self._gradients, self._all_gather = shard_map, gradients, all_gather

    @override
    def mesh_and_placements(self, parameter: Tensor) -> tuple[DeviceMesh, tuple[AxisPlacement, ...]]:
        return self._shard_map.mesh, self._shard_map.placements(parameter)

    @override
    def local(self, parameter: Tensor) -> Tensor:
        return self._shard_map.local(parameter)

    @override
    def has_gradient(self, parameter: Tensor) -> bool:
        return parameter in self._gradients.present

    @override
    def gradient(self, parameter: Tensor) -> Tensor | None:
        return self._gradients.reduced(parameter)

    @override
    def forget(self, parameters: Collection[Tensor]) -> None:
        self._gradients.forget(parameters)

    @override
    def begin_step(self, parameters: Collection[Tensor]) -> None:
        """Wait for the parameters that the last step has sent, and begin to update these."""
        self._updating = parameters
        self._all_gather.begin(parameters)

    @override
    def updated(self, parameters: Collection[Tensor]) -> None:
        self._all_gather.updated(parameters)

    @override
    def end_step(self) -> None:
        """Send remaining buckets and drop used gradients. Collective over the shard axis."""
        self._all_gather.finish_updates()
        self.forget(self._updating)

    @override
    def zeros_like(self, parameter: Tensor) -> Tensor:
        return self.laid_out(parameter, torch.zeros_like(self.local(parameter)))

    @override
    def zeros_of_neurons(self, parameter: Tensor, shape: tuple[int, ...], kept: Collection[int]) -> Tensor:
        zeros = torch.zeros(shape, dtype=torch.float32, device=parameter.device)
        return self._laid_out(parameter, self._shard_map.local(parameter, zeros).clone(), shape)

    @override
    def saved(self, states: Sequence[PlacedState]) -> list[Tensor]:
        """Owners' states as DTensors sharded by rows. Collective over the shard axis."""
        owned = {index: each for index, each in enumerate(states) if self._owner(each.parameter) is not None}
        self._require_equal({index: each.state for index, each in owned.items()})
        result = [each.state for each in states]
        for index, each in owned.items():
            result[index] = self._as_rows(self._rows_of_owner(each), each.shape)
        return result

    @override
    def loaded(self, states: Sequence[PlacedState]) -> list[Tensor]:
        """The inverse of :meth:`saved`. Collective over the shard axis."""
        rows = {
            index: each.state
            for index, each in enumerate(states)
            if isinstance(each.state, DTensor) and self._owner(each.parameter) is not None
        }
        error, placements = None, self._row_placements
        for state in rows.values():
            if (state.device_mesh, state.placements) != (self._shard_map.mesh, placements):
                error = ValueError(
                    f"state {tuple(state.shape)} is laid out as {state.placements} on {state.device_mesh}, but its "
                    f"parameter wants {placements} on {self._shard_map.mesh}; load it as it was saved, or as a whole"
                )
        fail_together(error, self._shard_map.shard)
        self._require_equal(rows)
        result: list[Tensor] = []
        for index, (parameter, state, shape) in enumerate(states):
            # One at a time: whole tensors take the memory that sharding saves.
            rows_on_device: Any = rows[index].to(parameter.device) if index in rows else None
            whole = state if rows_on_device is None else rows_on_device.full_tensor()
            if not isinstance(whole, DTensor):
                part = self._shard_map.local(parameter, whole.contiguous()).to(state.device, copy=True)
                whole = self._laid_out(parameter, part, shape)
            result.append(whole)
        return result

    def _require_equal(self, states: Mapping[int, Tensor]) -> None:
        """Raise on all ranks if dtypes or devices differ. Collective over the shard axis."""
        lines = [(f"tensor {index}", f"{each.dtype} on {each.device.type}") for index, each in states.items()]
        require_equal(lines, self._shard_map.shard, "optimizer state")

    def _rows_of_owner(self, each: PlacedState) -> Tensor:
        """This rank's rows of the owner's state. Collective over the shard axis."""
        group, owner, device = self._shard_map.shard, self._owner(each.parameter), each.parameter.device
        box = boxes_on_axis(each.shape, Shard(0), group.size)[group.rank]
        # A state that is kept on the host is sent from device to device, too.
        if group.rank == owner:
            whole = each.state.to(device).contiguous()
        else:
            whole = torch.empty(each.shape, dtype=each.state.dtype, device=device)
        if group.group is not None:
            dist.broadcast(whole, group=group.group, group_src=owner)
        return whole[box.start[0] : box.stop[0]].to(each.state.device, copy=True)

    def _owner(self, parameter: Tensor) -> int | None:
        """The rank of the shard axis that has all of the parameter, if one has."""
        placement = self._shard_map.placements(parameter)[-1]
        return placement.rank if isinstance(placement, OwnedBy) else None

    @override
    def laid_out(self, parameter: Tensor, part: Tensor) -> Tensor:
        return self._laid_out(parameter, part, tuple(parameter.shape))

    def _laid_out(self, parameter: Tensor, part: Tensor, shape: tuple[int, ...]) -> Tensor:
        has_rows = isinstance(self._shard_map.placements(parameter)[-1], Shard)
        return self._as_rows(part, shape) if has_rows else part

    @property
    def _row_placements(self) -> tuple[Placement, ...]:
        return (*(Replicate() for _ in range(self._shard_map.mesh.ndim - 1)), Shard(0))

    def _as_rows(self, local: Tensor, shape: tuple[int, ...]) -> DTensor:
        mesh, size = self._shard_map.mesh, torch.Size(shape)
        stride = contiguous_stride(shape)
        return DTensor.from_local(local, mesh, self._row_placements, run_check=False, shape=size, stride=stride)
