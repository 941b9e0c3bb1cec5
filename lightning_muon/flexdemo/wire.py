"""Formats in which values and indices are sent: float32, bfloat16, 8-bit integers, signs; integers of 16 or 32 bits.

Bytes follow from the numbers of blocks and of values of each, so that no sizes are sent. Scaled formats send a bfloat16
scale for each row of at most 256 values of one block, so that rounding does not depend on the rest of the batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

# Values that share a scale: the scale then costs 16 / 256 = 1/16 bit for each value of a long block.
SCALED_TOGETHER = 256
_SCALE_BYTES = 2


class ValueFormat(ABC):
    """How the values (num_blocks, num_sent), float32, of all blocks of a message become bytes."""

    bits: int  # Bits of a value.
    has_scales = True

    def num_bytes(self, num_blocks: int, num_sent: int) -> int:
        """Bytes of the values of all blocks, and of their scales."""
        num_scales = num_blocks * _num_rows(num_sent) if self.has_scales else 0
        return _SCALE_BYTES * num_scales - (-num_blocks * num_sent * self.bits // 8)

    @abstractmethod
    def pack(self, values: Tensor) -> Tensor:
        """Convert values to bytes: (num_bytes,) uint8."""

    @abstractmethod
    def unpack(self, buffer: Tensor, num_blocks: int, num_sent: int) -> Tensor:
        """Values (num_blocks, num_sent), float32, from the bytes of :meth:`pack`, which begin at a multiple of 4."""

    def rounded(self, values: Tensor) -> Tensor:
        """``values`` as the other nodes get them."""
        return self.unpack(self.pack(values), *values.shape)


class FloatFormat(ValueFormat):
    """Sends every value by itself, in a floating-point type: 32 or 16 bits for each."""

    has_scales = False

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.bits = dtype, 8 * dtype.itemsize

    @override
    def pack(self, values: Tensor) -> Tensor:
        return as_bytes(values.to(self.dtype))

    @override
    def unpack(self, buffer: Tensor, num_blocks: int, num_sent: int) -> Tensor:
        return buffer.view(self.dtype).to(torch.float32).view(num_blocks, num_sent)


class Int8Format(ValueFormat):
    """Sends ``scale * q``, ``q`` in -127..127, ``scale = max|v| / 127`` of each row: 8 bits, and 16 bits a row."""

    bits = 8

    @override
    def pack(self, values: Tensor) -> Tensor:
        scales = (_in_rows(values).abs().amax(2) / 127).to(torch.bfloat16)
        quotients = values / _of_values(scales, values.size(1))
        # 0 / 0 where all of a row is zero.
        integers = quotients.nan_to_num_(0.0, 127.0, -127.0).round_().clamp_(-127, 127).to(torch.int8)
        return torch.cat([as_bytes(scales), as_bytes(integers)])

    @override
    def unpack(self, buffer: Tensor, num_blocks: int, num_sent: int) -> Tensor:
        scales, integers = _split(buffer, num_blocks, num_sent)
        return integers.view(torch.int8).view(num_blocks, num_sent) * _of_values(scales, num_sent)


class SignFormat(ValueFormat):
    """Sends ``+-scale``, ``scale = mean|v|`` of each row, with the least squared error: 1 bit, and 16 bits a row."""

    bits = 1

    @override
    def pack(self, values: Tensor) -> Tensor:
        num_sent = values.size(1)
        in_row = torch.full((_num_rows(num_sent),), SCALED_TOGETHER, dtype=torch.float32, device=values.device)
        in_row[-1:] = num_sent - SCALED_TOGETHER * (_num_rows(num_sent) - 1)
        scales = (_in_rows(values).abs().sum(2) / in_row).to(torch.bfloat16)
        # Eight signs a byte, of which the first is the lowest bit.
        bits = (values >= 0).reshape(-1).view(torch.uint8)
        octets = F.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
        weights = 2 ** torch.arange(8, dtype=torch.uint8, device=bits.device)
        return torch.cat([as_bytes(scales), (octets * weights).sum(1, dtype=torch.uint8)])

    @override
    def unpack(self, buffer: Tensor, num_blocks: int, num_sent: int) -> Tensor:
        scales, packed = _split(buffer, num_blocks, num_sent)
        shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
        bits = packed[:, None].bitwise_right_shift(shifts).bitwise_and_(1).view(-1)[: num_blocks * num_sent]
        signs = bits.view(num_blocks, num_sent).to(torch.float32).mul_(2).sub_(1)
        return signs.mul_(_of_values(scales, num_sent))


VALUE_FORMATS: dict[str, ValueFormat] = {
    "fp32": FloatFormat(torch.float32),
    "bf16": FloatFormat(torch.bfloat16),
    "int8": Int8Format(),
    "sign": SignFormat(),
}


def index_dtype(block_numel: int) -> torch.dtype:
    """Dtype in which the indices of elements of a block are sent."""
    return torch.uint16 if block_numel <= 1 << 16 else torch.int32


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of ``tensor`` as (num_bytes,) uint8; a view where that is possible."""
    return tensor.reshape(-1).view(torch.uint8)


def _num_rows(num_sent: int) -> int:
    return -(-num_sent // SCALED_TOGETHER)


def _in_rows(values: Tensor) -> Tensor:
    """``values`` (num_blocks, num_sent) as (num_blocks, num_rows, row), the last row filled up with zeros."""
    num_blocks, num_sent = values.shape
    if 0 < num_sent <= SCALED_TOGETHER:
        return values.reshape(num_blocks, 1, num_sent)
    return F.pad(values, (0, -num_sent % SCALED_TOGETHER)).view(num_blocks, _num_rows(num_sent), SCALED_TOGETHER)


def _of_values(scales: Tensor, num_sent: int) -> Tensor:
    """Scales (num_blocks, num_rows), float32, in a shape that multiplies values (num_blocks, num_sent)."""
    scales = scales.to(torch.float32)
    return scales if num_sent <= SCALED_TOGETHER else scales.repeat_interleave(SCALED_TOGETHER, 1)[:, :num_sent]


def _split(buffer: Tensor, num_blocks: int, num_sent: int) -> tuple[Tensor, Tensor]:
    """The scales (num_blocks, num_rows) at the beginning of ``buffer``, and the bytes after them."""
    num_rows = _num_rows(num_sent)
    scales, rest = buffer.tensor_split([_SCALE_BYTES * num_blocks * num_rows])
    return scales.view(torch.bfloat16).view(num_blocks, num_rows), rest
