"""Formats of values: what comes back, in how many bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_muon.flexdemo.wire import VALUE_FORMATS, value_format

SHAPES = [(1, 1), (5, 1), (13, 7), (3, 256), (2, 257), (1, 1000), (127, 32)]
ROW = 256


def rows_of(values: Tensor) -> list[Tensor]:
    """Values that share a scale."""
    return [row for block in values for row in block.split(ROW)]


@pytest.mark.parametrize("name", VALUE_FORMATS)
@pytest.mark.parametrize("shape", [*SHAPES, (0, 8), (1, 0)], ids=str)
def test_a_message_has_the_bytes_that_were_counted_and_gives_the_rounded_values(
    name: str, shape: tuple[int, int]
) -> None:
    torch.manual_seed(sum(shape))
    values, way = torch.randn(shape), value_format(name)
    before = values.clone()
    packed = way.pack(values)
    assert packed.dtype == torch.uint8 and packed.shape == (way.num_bytes(*shape),)
    unpacked = way.unpack(packed, *shape)
    assert unpacked.dtype == torch.float32 and unpacked.shape == shape
    assert torch.equal(unpacked, way.rounded(values))
    assert torch.equal(values, before)
    # Anywhere in a message, aligned or not.
    message = torch.cat([torch.zeros(3, dtype=torch.uint8), packed])
    assert torch.equal(way.unpack(message[3:], *shape), unpacked)


@pytest.mark.parametrize(
    ("name", "num_bytes"), [("fp32", 4 * 600), ("bf16", 2 * 600), ("int8", 600 + 2 * 2 * 2), ("sign", 75 + 2 * 2 * 2)]
)
def test_bytes_of_two_blocks_of_300_values(name: str, num_bytes: int) -> None:
    assert value_format(name).num_bytes(2, 300) == num_bytes


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_floats_are_rounded_as_torch_rounds_them(shape: tuple[int, int]) -> None:
    values = torch.randn(shape)
    assert torch.equal(value_format("fp32").rounded(values), values)
    assert torch.equal(value_format("bf16").rounded(values), values.bfloat16().float())


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
def test_signs_come_back_with_the_mean_magnitude_of_their_row(shape: tuple[int, int]) -> None:
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
def test_a_block_is_rounded_alike_whatever_other_blocks_there_are(name: str) -> None:
    values = torch.randn(9, 13) * torch.logspace(-3, 3, 9)[:, None]
    rounded = value_format(name).rounded(values)
    assert torch.equal(value_format(name).rounded(values[4:6]), rounded[4:6])


def test_an_unknown_format_is_an_error() -> None:
    with pytest.raises(ValueError, match="value_format must be one of fp32, bf16, int8, sign, got 'fp8'"):
        value_format("fp8")
