"""8 bits against their definition: the bound of the error, and what comes back from codes of codes."""

import pytest
import torch

from lightning_muon.math.quantization import BLOCK, dequantize, num_blocks, quantize
from tests.reference.muon import in_8_bits

SHAPES = [(13, 7), (1, 1), (5, 1), (3, BLOCK), (4, BLOCK + 1), (2, 3 * BLOCK - 5), (0, 4)]


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e-44, 1e37])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_8_bits_are_the_definition_and_within_half_a_step(shape: tuple[int, int], scale: float) -> None:
    torch.manual_seed(sum(shape))
    matrix = torch.randn(shape) * scale
    codes, maxima = quantize(matrix)
    found = dequantize(codes, maxima)
    assert (codes.dtype, codes.shape) == (torch.int8, matrix.shape)
    assert (maxima.dtype, maxima.shape) == (torch.float32, (shape[0], num_blocks(shape[1])))
    # The last factors round once more: 2^-23 relative, and in full where float32 has no smaller numbers.
    for block, largest in zip(range(num_blocks(shape[1])), maxima.mT, strict=True):
        places = slice(block * BLOCK, (block + 1) * BLOCK)
        assert torch.equal(largest, matrix[:, places].abs().amax(1))
        error = (found[:, places].double() - matrix[:, places].double()).abs()
        assert (error <= largest.double()[:, None] * (1 / 254 + 1e-6) + 1.5e-45).all()
    assert torch.equal(found, in_8_bits(matrix))
    # What a checkpoint has goes on with the same bits.
    again = quantize(found)
    assert torch.equal(again[0], codes) and torch.equal(again[1], maxima)


def test_zeros_stay_and_what_is_not_finite_stays_in_its_block() -> None:
    matrix = torch.zeros(3, BLOCK + 2)
    matrix[1, 3], matrix[2, BLOCK] = torch.nan, torch.inf
    matrix[:, -1] = 2.0
    found = dequantize(*quantize(matrix))
    assert torch.equal(found[0], matrix[0])
    assert found[1, :BLOCK].isnan().all() and torch.equal(found[1, BLOCK:], matrix[1, BLOCK:])
    assert (found[2, :BLOCK] == 0).all() and not found[2, BLOCK:].isfinite().any()


def test_memory_need_not_be_contiguous() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(7, 26).mT[::2]
    codes, maxima = quantize(matrix)
    assert torch.equal(dequantize(codes, maxima), dequantize(*quantize(matrix.contiguous())))
    assert torch.equal(dequantize(codes.mT.contiguous().mT, maxima), dequantize(codes, maxima))
