"""How values and indices become bytes: sizes, rounding, and the way back."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_muon import DCTTopK, Full, Random, Replicator, Slicing, Striding
from lightning_muon.flexdemo.bucket_plan import Shape, message_bytes, num_blocks, plan_buckets
from lightning_muon.flexdemo.wire import (
    VALUE_FORMATS,
    as_bytes,
    from_bytes,
    index_bytes,
    pack_indices,
    unpack_indices,
    value_format,
)

SHAPES = [(1, 1), (13, 7), (2, 257), (1, 1000), (127, 32)]
ROW = 256


@pytest.mark.parametrize(
    ("replicator", "values", "bits"),
    [
        (DCTTopK(), "bf16", 32 * 32 / 4096),
        (DCTTopK(top_k=8), "fp32", 8 * 48 / 4096),
        (DCTTopK(top_k=4, strips=True), "bf16", 4 * 32 / 64),
        (DCTTopK(top_k=32), "int8", 32 * 24 / 4096 + 16 / 4096),
        (DCTTopK(top_k=32), "sign", 32 * 17 / 4096 + 16 / 4096),
        (Random(rate=1 / 16), "bf16", 1.0),
        (Striding(rate=1 / 16), "bf16", 1.0),
        (Slicing(rate=1 / 16), "fp32", 2.0),
        (Full(), "bf16", 16.0),
        (Full(), "sign", 1 + 16 / 256),
    ],
    ids=str,
)
def test_bits_of_whole_blocks_are_those_of_the_docs(replicator: Replicator, values: str, bits: float) -> None:
    shape = Shape((640, 1280), (640, 1280))
    (plan,) = plan_buckets([shape], replicator=replicator, value_format_name=values, dense_below=0, chunk_bytes=1 << 30)
    assert 8 * message_bytes(plan) / (640 * 1280) == pytest.approx(bits, rel=1e-12)


@pytest.mark.parametrize(
    ("shape", "expected"), [((), 1), ((64,), math.ceil(127 * 300 / 64)), ((64, 64), 10), ((127, 300), 1)]
)
def test_the_last_block_may_be_part_of_one(shape: tuple[int, ...], expected: int) -> None:
    assert num_blocks(shape, 127, 300) == expected


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_bytes_anywhere_in_a_message_come_back(dtype: torch.dtype, offset: int) -> None:
    tensor = torch.randint(-100, 100, (13, 7)).to(dtype)
    packed = as_bytes(tensor)
    assert packed.shape == (91 * dtype.itemsize,) and packed.dtype == torch.uint8
    message = torch.cat([torch.zeros(offset, dtype=torch.uint8), packed])
    assert torch.equal(from_bytes(message[offset:], dtype), tensor.view(-1))


@pytest.mark.parametrize(
    ("block_numel", "num_bytes"), [(1, 2), (4096, 2), (32769, 2), (65536, 2), (65537, 4), (1 << 31, 4)]
)
def test_indices_take_as_few_bytes_as_hold_them(block_numel: int, num_bytes: int) -> None:
    indices = torch.randint(block_numel, (13, 7))
    # The ends, and both sides of where 16 bits have their sign.
    indices[0] = torch.tensor([0, block_numel - 1, 32767, 32768, 65535, 65536, 1]).clamp(max=block_numel - 1)
    packed = pack_indices(indices, block_numel)
    assert index_bytes(block_numel) == num_bytes
    assert packed.shape == (91 * num_bytes,) and packed.dtype == torch.uint8
    assert torch.equal(unpack_indices(packed, 13, 7, block_numel), indices)


def rows_of(values: Tensor) -> list[Tensor]:
    """Values that share a scale."""
    return [row for block in values for row in block.split(ROW)]


@pytest.mark.parametrize("name", VALUE_FORMATS)
@pytest.mark.parametrize("shape", [*SHAPES, (0, 8), (1, 0)], ids=str)
def test_a_message_has_the_counted_bytes_and_rounded_values(name: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(sum(shape))
    values, way = torch.randn(shape), value_format(name)
    before = values.clone()
    packed = way.pack(values)
    assert packed.dtype == torch.uint8 and packed.shape == (way.num_bytes(*shape),)
    unpacked = way.unpack(packed, *shape)
    assert unpacked.dtype == torch.float32 and unpacked.shape == shape
    assert torch.equal(unpacked, way.rounded(values)) and torch.equal(values, before)
    if name in ("fp32", "bf16"):
        assert torch.equal(unpacked, values.to(torch.float32 if name == "fp32" else torch.bfloat16).float())
    # Anywhere in a message, aligned or not.
    message = torch.cat([torch.zeros(3, dtype=torch.uint8), packed])
    assert torch.equal(way.unpack(message[3:], *shape), unpacked)


@pytest.mark.parametrize(
    ("name", "num_bytes"), [("fp32", 4 * 600), ("bf16", 2 * 600), ("int8", 600 + 2 * 2 * 2), ("sign", 75 + 2 * 2 * 2)]
)
def test_bytes_of_two_blocks_of_300_values(name: str, num_bytes: int) -> None:
    assert value_format(name).num_bytes(2, 300) == num_bytes


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_int8_errs_by_half_a_step_of_its_row(shape: tuple[int, int], size: float) -> None:
    torch.manual_seed(sum(shape))
    values = torch.randn(shape) * size
    rounded = value_format("int8").rounded(values)
    for row, found in zip(rows_of(values), rows_of(rounded), strict=True):
        step = row.abs().max() / 127
        # Half a step of a scale that bfloat16 rounds by up to 2^-8, and as much of 127 steps at the largest.
        assert (row - found).abs().max() <= step * (0.5 + 127 / 256)
        inner = row.abs() < 0.99 * row.abs().max()
        assert not inner.any() or (row - found)[inner].abs().max() <= 0.5 * step * (1 + 1 / 128)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_signs_come_back_with_the_mean_magnitude_of_a_row(shape: tuple[int, int]) -> None:
    torch.manual_seed(sum(shape))
    values = torch.randn(shape)
    rounded = value_format("sign").rounded(values)
    for row, found in zip(rows_of(values), rows_of(rounded), strict=True):
        assert torch.equal(found.sign(), row.sign())
        # bfloat16 has 8 bits.
        assert torch.allclose(found.abs(), row.abs().mean().expand_as(row), rtol=2**-8)


@pytest.mark.parametrize("name", VALUE_FORMATS)
def test_what_the_format_can_hold_is_not_changed(name: str) -> None:
    torch.manual_seed(0)
    values = {
        "fp32": torch.randn(5, 300),
        "bf16": torch.randn(5, 300).bfloat16().float(),
        "int8": torch.randint(-127, 128, (5, 300)).float() * 0.25,
        "sign": torch.randint(0, 2, (5, 300)).float() * 3 - 1.5,
    }[name]
    # Every row has its largest integer, so that the scale is a power of two.
    values[:, ::40] = {"int8": 127 * 0.25, "sign": 1.5}.get(name, 1.0)
    assert torch.equal(value_format(name).rounded(values), values)


@pytest.mark.parametrize("name", VALUE_FORMATS)
def test_zeros_and_the_smallest_numbers_stay_finite(name: str) -> None:
    zeros = torch.zeros(4, 300)
    assert torch.equal(value_format(name).rounded(zeros), zeros)
    for smallest in (1e-45, 1e-38):
        rounded = value_format(name).rounded(torch.full((2, 7), smallest))
        assert rounded.isfinite().all() and rounded.abs().max() <= 1.1e-38


@pytest.mark.parametrize("name", ["int8", "sign"])
def test_rounding_of_a_block_ignores_the_other_blocks(name: str) -> None:
    values = torch.randn(9, 13) * torch.logspace(-3, 3, 9)[:, None]
    rounded = value_format(name).rounded(values)
    assert torch.equal(value_format(name).rounded(values[4:6]), rounded[4:6])


def test_an_unknown_format_is_an_error() -> None:
    with pytest.raises(ValueError, match="value_format must be one of fp32, bf16, int8, sign, got 'fp8'"):
        value_format("fp8")
