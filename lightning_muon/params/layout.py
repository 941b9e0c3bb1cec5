"""Which box of a parameter each rank holds."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lightning_muon.compat.torch import local_shape_and_offset
from lightning_muon.params.logical import Box, whole


def mesh_and_placements(tensor: Tensor, mesh: DeviceMesh | None) -> tuple[DeviceMesh | None, tuple[Placement, ...]]:
    """Mesh of a DTensor, or ``mesh`` for a plain tensor that it declares to be replicated; ``None`` if local."""
    if isinstance(tensor, DTensor):
        return tensor.device_mesh, tuple(tensor.placements)
    return mesh, (Replicate(),) * (mesh.ndim if mesh is not None else 0)


def sharded_axes(placements: Sequence[Placement], mesh_shape: Sequence[int], name: str) -> tuple[int, ...]:
    """Indices of the mesh axes, of more than one rank, over which a tensor is sharded."""
    for placement in placements:
        if not isinstance(placement, Shard | Replicate) and not hasattr(placement, "split_factor"):
            raise ValueError(f"{name} has the placement {placement}: ParallelMuon takes Shard and Replicate only")
    return tuple(
        axis
        for axis, placement in enumerate(placements)
        if not isinstance(placement, Replicate) and mesh_shape[axis] > 1
    )


def held_boxes(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: Sequence[Placement],
    coordinates: Sequence[tuple[int, ...]],
) -> tuple[Box, ...]:
    """Box of the parameter that the rank at each of the mesh ``coordinates`` holds; uneven and empty ones included."""
    boxes: list[Box] = []
    for coordinate in coordinates:
        if not placements:
            boxes.append(whole(shape))
            continue
        local_shape, offset = local_shape_and_offset(shape, mesh_shape, coordinate, placements)
        boxes.append(Box(offset, tuple(map(int.__add__, offset, local_shape))))
    return tuple(boxes)
