"""The orthonormal cosine transform (DCT-II) of many small blocks at once, and back from a few of its coefficients.

With the basis ``C[k, i] = c_k cos(pi (2 i + 1) k / (2 N))``, ``c_0 = sqrt(1 / N)`` and ``c_k = sqrt(2 / N)`` otherwise,
a block ``x`` of one dimension becomes ``C x`` and one of two dimensions ``C_a X C_b^T``. ``C`` is orthogonal, so that
the inverse is the transpose and no energy is lost or gained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

# Elements that are worked on at a time on a CPU: 1 MiB, so that what lies between two steps stays near the core. With
# 64 x 64 blocks the transform takes 0.65 to 0.9 of the time of all at once (benchmarks/codec.py); with half of the
# elements encoding takes 1.06 of the time, since there are twice as many calls.
_GROUP_NUMEL = {"cpu": 1 << 18}


def groups(blocks: Float[Tensor, "num ..."]) -> Iterator[slice]:
    """Ranges of blocks that together fill a cache; on CUDA one of all."""
    num, block_numel = blocks.size(0), math.prod(blocks.shape[1:])
    size = max(1, _GROUP_NUMEL.get(blocks.device.type, num * block_numel) // max(1, block_numel))
    return (slice(start, min(start + size, num)) for start in range(0, num, size))


@cache
def dct_basis(size: int, device: torch.device) -> Float[Tensor, "size size"]:
    """Rows are the cosines ``C[k]`` from low to high frequency; float32, computed in float64. Not to be changed."""
    numbers = torch.arange(size, dtype=torch.float64, device="cpu")
    angles = numbers[:, None] * (2 * numbers + 1)
    basis = torch.cos(angles * (math.pi / (2 * size))) * math.sqrt(2 / size)
    basis[0] = math.sqrt(1 / size)
    return basis.to(device, torch.float32)


def dct(blocks: Float[Tensor, "num ..."]) -> Float[Tensor, "num ..."]:
    """Coefficients of each block of one or two dimensions: ``C x``, ``C_a X C_b^T``."""
    coefficients = torch.empty_like(blocks, memory_format=torch.contiguous_format)
    for group in groups(blocks):
        _transform(blocks[group], inverse=False, out=coefficients[group])
    return coefficients


def inverse_dct(coefficients: Float[Tensor, "num ..."]) -> Float[Tensor, "num ..."]:
    """Each block from its coefficients: ``C^T e``, ``C_a^T E C_b``."""
    blocks = torch.empty_like(coefficients, memory_format=torch.contiguous_format)
    for group in groups(coefficients):
        _transform(coefficients[group], inverse=True, out=blocks[group])
    return blocks


def sparse_inverse_dct(
    values: Float[Tensor, "num few"], indices: Int[Tensor, "num few"], block_shape: tuple[int, ...]
) -> Float[Tensor, "num ..."]:
    """Each block from a few of its coefficients; all others are zero.

    Sums ``v C_a[r]^T C_b[c]`` over the coefficients ``v`` at ``(r, c)`` (``v C[r]`` in one dimension) while that needs
    no more multiplications than the dense transform, ``few <= a + b`` (``few <= a``). The times cross there too: at
    128 of 64 x 64 (benchmarks/codec.py).

    Args:
        values: The coefficients. Of those at equal indices of a block all but one are zero.
        indices: Where they are in the flattened block, from 0.
        block_shape: One or two dimensions.

    Returns:
        ``(num, *block_shape)``.
    """
    blocks = values.new_empty((values.size(0), *block_shape))
    inverse = _inverse_for(values.size(1), block_shape)
    for group in groups(blocks):
        inverse(values[group], indices[group], blocks[group])
    return blocks


def subtract_sparse_inverse_dct_(
    blocks: Float[Tensor, "num ..."], values: Float[Tensor, "num few"], indices: Int[Tensor, "num few"]
) -> None:
    """``blocks -= sparse_inverse_dct(values, indices, blocks.shape[1:])``, in one pass where that is possible."""
    inverse = _inverse_for(values.size(1), tuple(blocks.shape[1:]))
    for group in groups(blocks):
        if inverse is _sum_of_products:
            _sum_of_products(values[group], indices[group], blocks[group], beta=1, alpha=-1)
        else:
            taken = torch.empty_like(blocks[group])
            inverse(values[group], indices[group], taken)
            blocks[group].sub_(taken)


def _inverse_for(few: int, block_shape: tuple[int, ...]) -> Callable[[Tensor, Tensor, Tensor], None]:
    """The cheapest of three ways for so many coefficients of a block."""
    if few > sum(block_shape):
        return _dense_inverse
    return _sum_of_columns if len(block_shape) == 1 else _sum_of_products


def _transform(blocks: Tensor, *, inverse: bool, out: Tensor) -> None:
    """``C x`` or ``C^T x`` along every dimension but the first."""
    last = blocks.size(-1)
    right = _operand(last, blocks.device, transposed=not inverse)
    if blocks.ndim == 2:
        torch.mm(blocks, right, out=out)
        return
    along_last = torch.mm(blocks.reshape(-1, last), right).view(blocks.shape)
    torch.matmul(_operand(blocks.size(1), blocks.device, transposed=inverse), along_last, out=out)


def _dense_inverse(values: Tensor, indices: Tensor, out: Tensor) -> None:
    """Write the coefficients into zeros and transform all."""
    starts = torch.arange(0, out.numel(), math.prod(out.shape[1:]), device=out.device)[:, None]
    # One place more, for the zeros: they must not overwrite a coefficient at the same position.
    coefficients = out.new_zeros(out.numel() + 1)
    addresses = (indices + starts).masked_fill_(values == 0, out.numel())
    coefficients.index_copy_(0, addresses.view(-1), values.reshape(-1))
    _transform(coefficients[:-1].view(out.shape), inverse=True, out=out)


def _sum_of_columns(values: Tensor, indices: Tensor, out: Tensor) -> None:
    """``sum v C[r]`` for blocks of one dimension."""
    basis = dct_basis(out.size(1), out.device)
    out.copy_(F.embedding_bag(indices, basis, mode="sum", per_sample_weights=values))


def _sum_of_products(values: Tensor, indices: Tensor, out: Tensor, *, beta: int = 0, alpha: int = 1) -> None:
    """``beta out + alpha sum v C_a[r]^T C_b[c]`` for blocks of two dimensions."""
    num, rows, cols = out.shape
    flat = indices.reshape(-1)
    left = dct_basis(rows, out.device).index_select(0, flat // cols).mul_(values.reshape(-1, 1)).view(num, -1, rows)
    right = dct_basis(cols, out.device).index_select(0, flat % cols).view(num, -1, cols)
    torch.baddbmm(out, left.mT, right, beta=beta, alpha=alpha, out=out)


@cache
def _operand(size: int, device: torch.device, *, transposed: bool) -> Tensor:
    """The basis, or its transpose in contiguous memory, which a CPU multiplies faster with."""
    basis = dct_basis(size, device)
    return basis.mT.contiguous() if transposed else basis
