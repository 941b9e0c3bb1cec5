"""Formats in which values travel: float32, bfloat16, 8-bit integers, signs.

All bytes of a format follow from the number of blocks and of values of each, so that no sizes travel. Scaled formats
send one bfloat16 scale for each row of at most 256 values; a row never reaches over two blocks, so that what is rounded
does not depend on what else is in the batch.
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

    @abstractmethod
    def num_bytes(self, num_blocks: int, num_sent: int) -> int:
        """Bytes of ``num_sent`` values of each of ``num_blocks`` blocks."""

    @abstractmethod
    def pack(self, values: Tensor) -> Tensor:
        """``values`` (num_blocks, num_sent), float32, as (num_bytes,) uint8."""

    @abstractmethod
    def unpack(self, buffer: Tensor, num_blocks: int, num_sent: int) -> Tensor:
        """(num_blocks, num_sent), float32, from the bytes of :meth:`pack`."""

    def rounded(self, values: Tensor) -> Tensor:
        """What the others get of ``values``: ``unpack(pack(values))``."""
        return self.unpack(self.pack(values), *values.shape)


class FloatFormat(ValueFormat):
    """Every value by itself, in a floating-point type: 32 or 16 bits for each."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    @override
    def num_bytes(self, num_blocks: int, num_sent: int) -> int:
        return self.dtype.itemsize * num_blocks * num_sent

    @override
    def pack(self, values: Tensor) -> Tensor:
        return as_bytes(values.to(self.dtype))

    @override
    def unpack(self, buffer: Tensor, num_blocks: int, num_sent: int) -> Tensor:
        return from_bytes(buffer, self.dtype).to(torch.float32).view(num_blocks, num_sent)

    @override
    def rounded(self, values: Tensor) -> Tensor:
        return values.to(self.dtype).to(torch.float32)


class Int8Format(ValueFormat):
    """``scale * q`` with ``q`` in -127..127 and ``scale = max|v| / 127`` of each row: 8 bits and 16 bits a row.

    The error of a value is at most half a scale, and for the largest of a row a whole one, since the scale is rounded.
    """

    @override
    def num_bytes(self, num_blocks: int, num_sent: int) -> int:
        return num_blocks * (num_sent + _SCALE_BYTES * _num_rows(num_sent))

    @override
    def pack(self, values: Tensor) -> Tensor:
        """First all scales, then all values."""
        scales = (_in_rows(values).abs().amax(2) / 127).to(torch.bfloat16)
        quotients = values / _of_values(scales, values.size(1))
        # 0 / 0 where all of a row is zero.
        integers = quotients.nan_to_num_(0.0, 127.0, -127.0).round_().clamp_(-127, 127).to(torch.int8)
        return torch.cat([as_bytes(scales), as_bytes(integers)])

    @override
    def unpack(self, buffer: Tensor, num_blocks: int, num_sent: int) -> Tensor:
        scales, integers = _split(buffer, num_blocks, num_sent)
        return from_bytes(integers, torch.int8).view(num_blocks, num_sent) * _of_values(scales, num_sent)


class SignFormat(ValueFormat):
    """``+-scale`` with ``scale = mean|v|`` of each row: 1 bit, and 16 bits a row. A zero counts as positive.

    Of all numbers the mean is the scale with the least squared error.
    """

    @override
    def num_bytes(self, num_blocks: int, num_sent: int) -> int:
        return num_blocks * _SCALE_BYTES * _num_rows(num_sent) + -(-num_blocks * num_sent // 8)

    @override
    def pack(self, values: Tensor) -> Tensor:
        """First all scales, then all signs."""
        num_sent = values.size(1)
        in_row = torch.full((_num_rows(num_sent),), SCALED_TOGETHER, dtype=torch.float32, device=values.device)
        in_row[-1:] = num_sent - SCALED_TOGETHER * (_num_rows(num_sent) - 1)
        scales = (_in_rows(values).abs().sum(2) / in_row).to(torch.bfloat16)
        return torch.cat([as_bytes(scales), _pack_bits((values >= 0).reshape(-1))])

    @override
    def unpack(self, buffer: Tensor, num_blocks: int, num_sent: int) -> Tensor:
        scales, packed = _split(buffer, num_blocks, num_sent)
        signs = _unpack_bits(packed, num_blocks * num_sent).view(num_blocks, num_sent)
        return signs.to(torch.float32).mul_(2).sub_(1).mul_(_of_values(scales, num_sent))


VALUE_FORMATS: dict[str, ValueFormat] = {
    "fp32": FloatFormat(torch.float32),
    "bf16": FloatFormat(torch.bfloat16),
    "int8": Int8Format(),
    "sign": SignFormat(),
}


def value_format(name: str) -> ValueFormat:
    """The format of that name.

    Raises:
        ValueError: There is none.
    """
    if name not in VALUE_FORMATS:
        raise ValueError(f"value_format must be one of {', '.join(VALUE_FORMATS)}, got {name!r}")
    return VALUE_FORMATS[name]


def _num_rows(num_sent: int) -> int:
    """Scales of a block."""
    return -(-num_sent // SCALED_TOGETHER)


def _in_rows(values: Tensor) -> Tensor:
    """``values`` (num_blocks, num_sent) as (num_blocks, num_rows, row), the last row filled up with zeros."""
    num_blocks, num_sent = values.shape
    if 0 < num_sent <= SCALED_TOGETHER:
        return values.reshape(num_blocks, 1, num_sent)
    return F.pad(values, (0, -num_sent % SCALED_TOGETHER)).view(num_blocks, _num_rows(num_sent), SCALED_TOGETHER)


def _of_values(scales: Tensor, num_sent: int) -> Tensor:
    """The scale of each value: (num_blocks, num_rows) -> what (num_blocks, num_sent) can be multiplied with."""
    scales = scales.to(torch.float32)
    return scales if num_sent <= SCALED_TOGETHER else scales.repeat_interleave(SCALED_TOGETHER, 1)[:, :num_sent]


def _split(buffer: Tensor, num_blocks: int, num_sent: int) -> tuple[Tensor, Tensor]:
    """The scales (num_blocks, num_rows) at the beginning of ``buffer``, and the bytes after them."""
    num_rows = _num_rows(num_sent)
    scales, rest = buffer.tensor_split([_SCALE_BYTES * num_blocks * num_rows])
    return from_bytes(scales, torch.bfloat16).view(num_blocks, num_rows), rest


def _pack_bits(bits: Tensor) -> Tensor:
    """Booleans (n,) as (ceil(n / 8),) uint8; the first of eight is the lowest bit."""
    octets = F.pad(bits.view(torch.uint8), (0, -bits.numel() % 8)).view(-1, 8)
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (octets * weights).sum(1, dtype=torch.uint8)


def _unpack_bits(packed: Tensor, num_bits: int) -> Tensor:
    """The inverse of :func:`_pack_bits`: (num_bits,) uint8 of 0 and 1."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return packed[:, None].bitwise_right_shift(shifts).bitwise_and_(1).view(-1)[:num_bits]


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of ``tensor`` as (num_bytes,) uint8; a view where that is possible."""
    return tensor.reshape(-1).view(torch.uint8)


def from_bytes(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """``buffer`` (num_bytes,) uint8 as a tensor of ``dtype`` of one dimension; a view where that is possible.

    A part of a message may begin at any byte; memory that is not aligned to ``dtype`` is copied.
    """
    buffer = buffer.contiguous()
    return (buffer.clone() if buffer.storage_offset() % dtype.itemsize else buffer).view(dtype)


_TWO_BYTES = 1 << 16


def index_bytes(block_numel: int) -> int:
    """Bytes of one position in a block of so many elements."""
    return 2 if block_numel <= _TWO_BYTES else 4


def pack_indices(indices: Tensor, block_numel: int) -> Tensor:
    """``indices`` (num_blocks, num_sent), int64, as (num_bytes,) uint8."""
    # From 32768 on the conversion wraps around to negative numbers, which unpack_indices undoes.
    return as_bytes(indices.to(torch.int16 if block_numel <= _TWO_BYTES else torch.int32))


def unpack_indices(buffer: Tensor, num_blocks: int, num_sent: int, block_numel: int) -> Tensor:
    """The inverse of :func:`pack_indices`: (num_blocks, num_sent), int64."""
    if block_numel <= _TWO_BYTES:
        indices = from_bytes(buffer, torch.int16).to(torch.int64).bitwise_and_(_TWO_BYTES - 1)
    else:
        indices = from_bytes(buffer, torch.int32).to(torch.int64)
    return indices.view(num_blocks, num_sent)
