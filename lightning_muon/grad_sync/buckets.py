"""Parameters whose gradients travel together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# As in torch's DistributedDataParallel (bucket_cap_mb=25).
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True, eq=False)
class Bucket:
    """Parameters of one dtype and device.

    Attributes:
        index: Place in the order of launches.
        parameters: In the order in which backward is expected to reach them.
    """

    index: int
    parameters: tuple[Tensor, ...]


def num_bytes(tensor: Tensor) -> int:
    """Size of the elements of a tensor."""
    return tensor.numel() * tensor.element_size()


def make_buckets(parameters: Sequence[Tensor], *, bucket_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Buckets of at most ``bucket_bytes`` in the order in which backward completes them; pure.

    Backward is expected to reach the parameters in the reverse of the given order. A parameter that is larger than
    ``bucket_bytes`` has a bucket of its own.

    Args:
        parameters: Different tensors, in the order of the modules.
        bucket_bytes: At least 1.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    current: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    groups: list[list[int]] = []
    for index in reversed(range(len(parameters))):
        key, size = (parameters[index].dtype, parameters[index].device), num_bytes(parameters[index])
        if key not in current or sizes[key] + size > bucket_bytes:
            current[key], sizes[key] = [], 0
            groups.append(current[key])
        current[key].append(index)
        sizes[key] += size
    groups.sort(key=lambda group: -group[-1])
    return [Bucket(number, tuple(parameters[index] for index in group)) for number, group in enumerate(groups)]
