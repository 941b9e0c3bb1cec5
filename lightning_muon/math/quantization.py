"""Numbers in 8 bits: blocks of a row share a scale, and equal steps lie between the values that they can take.

A block ``x`` of at most ``BLOCK`` neighbours in a row has its largest magnitude ``m = max |x|`` in float32 and the
codes ``q = round(127 x / m)``, integers from -127 to 127; they stand for ``q m / 127``, which is off by at most
``m / 254``. The element of magnitude ``m`` comes back as it was, so that codes and maxima of what came back are the
same again.

Source: Gupta et al. 2025, arXiv:2509.23106 (linear quantization, blocks of 2048 elements), after Dettmers et al. 2021,
arXiv:2110.02861. Their blocks are parts of the flattened tensor. Those of one row are at most as long, and never cross
a border between shards of rows, so that codes and maxima do not depend on the number of shards.
"""

from __future__ import annotations

from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import Tensor

with suppress(ImportError):  # The shapes in annotations are read by tests and type checkers alone.
    from jaxtyping import Float, Int8

BLOCK = 2048  # Gupta et al. 2025.
_LARGEST = 127
# Rounded to float32 and multiplied by 127 this is exactly 1. Not a division, which CUDA turns into such a product.
_STEP = 1 / _LARGEST


def num_blocks(cols: int) -> int:
    """Blocks of a row."""
    return -(-cols // BLOCK)


def quantize(matrix: Float[Tensor, "rows cols"]) -> tuple[Int8[Tensor, "rows cols"], Float[Tensor, "rows blocks"]]:
    """Codes and maxima of a float32 matrix; blocks with a NaN or an infinity come back as NaN."""
    blocks = _in_blocks(matrix)
    maxima = blocks.abs().amax(-1)
    divisors = torch.where(maxima == 0, 1.0, maxima)
    codes = (blocks / divisors.unsqueeze(-1)).mul_(_LARGEST).round_().to(torch.int8)
    return codes.flatten(1)[:, : matrix.shape[1]], maxima


def dequantize(codes: Int8[Tensor, "rows cols"], maxima: Float[Tensor, "rows blocks"]) -> Float[Tensor, "rows cols"]:
    """The float32 values that codes stand for."""
    blocks = _in_blocks(codes).to(torch.float32).mul_(_STEP).mul_(maxima.unsqueeze(-1))
    return blocks.flatten(1)[:, : codes.shape[1]]


def _in_blocks(matrix: Tensor) -> Tensor:
    """(rows, cols) -> (rows, blocks, elements of a block); a last block that is shorter is filled up with zeros."""
    rows, cols = matrix.shape
    size = min(cols, BLOCK)
    filled: Tensor = F.pad(matrix, (0, -cols % size)) if cols % size else matrix
    return filled.reshape(rows, num_blocks(cols), size)
