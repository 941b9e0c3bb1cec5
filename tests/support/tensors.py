"""Gradients from seeds, whole weights, and tensors that are compared bit by bit."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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
    "other_heads": (5, 12),
}


def set_gradients(parameters: Iterable[Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def train(optimizer: Any, steps: Iterable[int]) -> Any:
    """Take steps with gradients from their numbers; the optimizer."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step in steps:
        set_gradients(parameters, step)
        optimizer.step()
    return optimizer


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def whole(tensor: Tensor) -> Tensor:
    """A copy; collective over the mesh of a DTensor, every rank must call it."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def wholes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of each; every rank must call it, with the tensors that it has."""
    return {name: whole(tensor) for name, tensor in tensors.items()}


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return wholes(dict(module.named_parameters()))


def are_equal(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))
