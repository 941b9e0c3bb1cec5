"""Tensors as bytes, and back."""

from __future__ import annotations

import torch
from torch import Tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of ``tensor`` as (num_bytes,) uint8; a view where that is possible."""
    return tensor.reshape(-1).view(torch.uint8)


def from_bytes(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """``buffer`` (num_bytes,) uint8 as a tensor of ``dtype`` of one dimension; a view where that is possible.

    A part of a message may begin at any byte; memory that is not aligned to ``dtype`` is copied.
    """
    buffer = buffer.contiguous()
    return (buffer.clone() if buffer.storage_offset() % dtype.itemsize else buffer).view(dtype)
