"""Positions of sent values within their block, as bytes: 2 for each where that is enough, else 4."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_muon.replicators.bytes import as_bytes, from_bytes

_TWO_BYTES = 1 << 16


def position_bytes(block_numel: int) -> int:
    """Bytes of one position in a block of so many elements."""
    return 2 if block_numel <= _TWO_BYTES else 4


def pack_positions(positions: Tensor, block_numel: int) -> Tensor:
    """``positions`` (num_blocks, num_sent), int64, as (num_bytes,) uint8."""
    # From 32768 on the conversion wraps around to negative numbers, which unpack_positions undoes.
    return as_bytes(positions.to(torch.int16 if block_numel <= _TWO_BYTES else torch.int32))


def unpack_positions(buffer: Tensor, num_blocks: int, num_sent: int, block_numel: int) -> Tensor:
    """The inverse of :func:`pack_positions`: (num_blocks, num_sent), int64."""
    if block_numel <= _TWO_BYTES:
        positions = from_bytes(buffer, torch.int16).to(torch.int64).bitwise_and_(_TWO_BYTES - 1)
    else:
        positions = from_bytes(buffer, torch.int32).to(torch.int64)
    return positions.view(num_blocks, num_sent)
