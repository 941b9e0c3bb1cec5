"""How values and indices become bytes: sizes, rounding, and the way back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_muon.flexdemo.wire import VALUE_FORMATS, as_bytes, index_dtype

SHAPES = [(1, 1), (13, 7), (2, 257), (1, 1000), (127, 32)]
ROW = 256


@pytest.mark.parametrize(
    ("block_numel", "num_bytes"), [(1, 2), (4096, 2), (32769, 2), (65536, 2), (65537, 4), (1 << 31, 4)]
)
def test_indices_take_as_few_bytes_as_hold_them(block_numel: int, num_bytes: int) -> None:
    # The ends, and both sides of where 16 bits have their sign.
    indices = torch.tensor([0, block_numel - 1, 32767, 32768, 65535, 65536, 1]).clamp(max=block_numel - 1)
    dtype = index_dtype(block_numel)
    packed = as_bytes(indices.to(dtype))
    assert packed.numel() == 7 * num_bytes
    assert torch.equal(packed.view(dtype).to(torch.int64), indices)


def rows_of(values: Tensor) -> list[Tensor]:
    """Values that share a scale."""
    return [row for block in values for row in block.split(ROW)]


@pytest.mark.parametrize("name", VALUE_FORMATS)
@pytest.mark.parametrize("shape", [*SHAPES, (0, 8), (1, 0)], ids=str)
def test_a_message_has_the_counted_bytes_and_rounded_values(name: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(sum(shape))
    values, way = torch.randn(shape), VALUE_FORMATS[name]
    before = values.clone()
    packed = way.pack(values)
    assert packed.dtype == torch.uint8 and packed.shape == (way.num_bytes(*shape),)
    unpacked = way.unpack(packed, *shape)
    assert unpacked.dtype == torch.float32 and unpacked.shape == shape
    assert torch.equal(unpacked, way.rounded(values)) and torch.equal(values, before)
    if name in ("fp32", "bf16"):
        assert torch.equal(unpacked, values.to(torch.float32 if name == "fp32" else torch.bfloat16).float())
    # Behind other parts of a message.
    message = torch.cat([torch.zeros(8, dtype=torch.uint8), packed])
    assert torch.equal(way.unpack(message[8:], *shape), unpacked)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_int8_errs_by_half_a_step_of_its_row(shape: tuple[int, int], size: float) -> None:
    torch.manual_seed(sum(shape))
    values = torch.randn(shape) * size
    rounded = VALUE_FORMATS["int8"].rounded(values)
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
    rounded = VALUE_FORMATS["sign"].rounded(values)
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
    assert torch.equal(VALUE_FORMATS[name].rounded(values), values)
    assert torch.equal(VALUE_FORMATS[name].rounded(torch.zeros(4, 300)), torch.zeros(4, 300))
    for smallest in (1e-45, 1e-38):
        rounded = VALUE_FORMATS[name].rounded(torch.full((2, 7), smallest))
        assert rounded.isfinite().all() and rounded.abs().max() <= 1.1e-38
