"""Gradients from seeds, whole weights, and tensors that are compared bit by bit."""

from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_muon.compat.torch import local_shape_and_offset

# Of tensors whose gradients are drawn: rows that do not divide, fewer rows or columns than ranks, tall, flat, stacks of
# experts, convolutions, one and no dimension.
SHAPES: dict[str, tuple[int, ...]] = {
    "odd": (13, 7),
    "square": (64, 64),
    "flat": (3, 200),
    "row": (1, 9),
    "tall": (200, 3),
    "column": (9, 1),
    "stack": (3, 10, 6),
    "stack_of_one": (1, 12, 5),
    "convolution": (6, 4, 3, 3),
    "queries": (12, 8),
    "heads": (5, 12),
    "bias": (5,),
    "scalar": (),
}


def set_gradients(parameters: Iterable[Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def whole(tensor: Tensor) -> Tensor:
    """A copy; collective over the mesh of a DTensor, every rank must call it."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def wholes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of each, with one message for all DTensors; every rank must call it, whichever tensors it has."""
    copies = {name: tensor.detach() for name, tensor in tensors.items()}
    divided = {name: tensor for name, tensor in copies.items() if isinstance(tensor, DTensor)}
    if dist.is_initialized():
        found: list[Any] = [{}] * dist.get_world_size()
        dist.all_gather_object(found, {name: _placed(tensor) for name, tensor in divided.items()})
    for name, tensor in divided.items():
        copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        for offsets, shape, values in filter(itemgetter(2), (found[rank][name] for rank in _holders(tensor))):
            part = tuple(slice(offset, offset + size) for offset, size in zip(offsets, shape, strict=True))
            copies[name][part] = torch.frombuffer(values, dtype=tensor.dtype).view(shape)
    return {name: tensor.clone() for name, tensor in copies.items()}


def _placed(tensor: DTensor) -> tuple[tuple[int, ...], torch.Size, bytearray]:
    """Where this rank's shard begins, its shape and its bytes, which are pickled faster than a tensor."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    _, offsets = local_shape_and_offset(tensor.shape, tuple(mesh.shape), coordinate, tensor.placements)
    local = tensor.to_local().contiguous()
    return offsets, local.shape, bytearray(local.view(-1).view(torch.uint8).numpy())


def _holders(tensor: DTensor) -> list[int]:
    """The ranks of this rank's replica, whose shards make up the tensor: other replicas may differ."""
    own = zip(tensor.placements, tensor.device_mesh.get_coordinate() or (), strict=True)
    return tensor.device_mesh.mesh[tuple(at if p.is_replicate() else slice(None) for p, at in own)].flatten().tolist()


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return wholes(dict(module.named_parameters()))


def are_equal(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))
