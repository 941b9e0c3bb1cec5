"""Layout and state of parameters whose gradients are averaged inside of a node only, and checks of equal weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from typing_extensions import override

from lightning_muon.comm.agreement import gather
from lightning_muon.comm.groups import AxisGroup, shard_axis
from lightning_muon.config import join_names
from lightning_muon.math.checksum import checksums
from lightning_muon.params.layout import AxisPlacement, Decoupled, Layout, contiguous_stride, local_tensor


class NodeLayout(Layout):
    """Layout, on the whole mesh, of DTensors on ``mesh["shard"]`` and plain tensors; each node has its gradients.

    Without a mesh that of a single process.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__(mesh)
        self._nodes, self._node = mesh, None if mesh is None else shard_axis(mesh)
        self.num_nodes = 1 if mesh is None else mesh.size(0)

    @override
    def mesh_and_placements(self, parameter: Tensor) -> tuple[DeviceMesh | None, tuple[AxisPlacement, ...]]:
        if self._nodes is None:
            return super().mesh_and_placements(parameter)
        return self._nodes, (Decoupled(), *self._inside(parameter, self._nodes))

    def of_all_nodes(self, parameter: Tensor, local: Tensor) -> Tensor:
        """The calling rank's parts of a tensor of each node as one tensor (R, *parameter.shape). Shares memory."""
        if self._nodes is None:
            return local.unsqueeze(0)
        shape, placements = torch.Size((self.num_nodes, *parameter.shape)), self._of_nodes(parameter, self._nodes)
        stride = contiguous_stride(shape)
        return DTensor.from_local(
            local.unsqueeze(0), self._nodes, placements, run_check=False, shape=shape, stride=stride
        )

    def of_this_node(self, value: Tensor, parameter: Tensor) -> Tensor:
        """The calling rank's part of a saved ``value`` (R, *parameter.shape), float32, for the current number of nodes.

        Of another number every node gets the mean, so that the mean over the nodes, which is what they apply of
        residuals, stays the same. Collective over the mesh of a DTensor.
        """
        if value.shape[1:] != parameter.shape:
            raise ValueError(
                f"what was saved of each node for a parameter of shape {tuple(parameter.shape)} has the shape "
                f"{tuple(value.shape)}; expected (number of nodes, *shape)"
            )
        is_same = value.shape[0] == self.num_nodes
        if self._nodes is None:
            own = (value.full_tensor() if isinstance(value, DTensor) else value).to(parameter.device)
        else:
            of_nodes, *inside = self._of_nodes(parameter, self._nodes)
            own = _redistributed(value, self._nodes, (of_nodes if is_same else Replicate(), *inside))
        return own[0].float().clone() if is_same else own.float().mean(0)

    def _of_nodes(self, parameter: Tensor, nodes: DeviceMesh) -> tuple[Placement, ...]:
        """Placements of a tensor (R, *parameter.shape)."""
        inside = self._inside(parameter, nodes)
        return (Shard(0), *(Shard(each.dim + 1) if isinstance(each, Shard) else each for each in inside))

    def _inside(self, parameter: Tensor, nodes: DeviceMesh) -> tuple[Placement, ...]:
        """Placement along the ranks of a node."""
        if not isinstance(parameter, DTensor):
            # FSDP2 takes no 0-d parameters; the training loop must average their gradients.
            if parameter.ndim and parameter.requires_grad and nodes.size(1) > 1:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is not sharded, but a node has "
                    f"{nodes.size(1)} ranks, which would train it apart from each other; call "
                    "fully_shard(module, mesh=mesh['shard']) on the whole module, after its parts"
                )
            return (Replicate(),)
        if parameter.device_mesh != self._node:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} lies on {parameter.device_mesh}, but FlexDeMo averages "
                f"between the nodes of {nodes} itself; shard the model inside of a node only: "
                "fully_shard(module, mesh=mesh['shard'])"
            )
        return tuple(parameter.placements)


def part_of(value: Tensor, parameter: Tensor) -> Tensor:
    """The calling rank's part of a saved ``value``. Collective over the mesh of a DTensor."""
    if not isinstance(parameter, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    return _redistributed(value, parameter.device_mesh, parameter.placements)


def _redistributed(value: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """The local part of a DTensor, or of a whole tensor that every rank has, with other placements."""
    if not isinstance(value, DTensor):
        value = DTensor.from_local(value, mesh, (Replicate(),) * mesh.ndim, run_check=False)  # On the mesh's device.
    return value.redistribute(mesh, placements).to_local()


def check_equal(tensors: Sequence[tuple[str, Tensor]], everyone: AxisGroup) -> None:
    """Raise on all ranks if a DTensor differs between nodes, or a plain tensor between ranks, in any bit.

    Collective over ``everyone``, all ranks of all nodes with the same names.
    """
    if everyone.size == 1 or not tensors:
        return
    sums = gather(checksums([local_tensor(tensor) for _, tensor in tensors]).tolist(), everyone)
    rank_of = {coordinate: rank for rank, coordinate in enumerate(everyone.coordinates)}
    drifted: list[str] = []
    for number, (name, tensor) in enumerate(tensors):
        for rank, (_, shard) in enumerate(everyone.coordinates):
            first = rank_of[0, shard if isinstance(tensor, DTensor) else 0]
            if sums[rank][number] != sums[first][number]:
                drifted.append(name)
                break
    if drifted:
        raise RuntimeError(
            f"{len(drifted)} parameters are not what they are on the first node: {join_names(drifted)}. The nodes have "
            "begun with different weights, or their learning rates differ (a scheduler that follows the loss of one "
            "rank), or something has changed weights on some of them only, such as a callback that runs on rank 0, or "
            "gradients of parameters that FSDP2 does not shard (0-d ones, ignored_params) were not averaged before "
            "step(); let it be the same on all ranks, and load the last checkpoint"
        )
