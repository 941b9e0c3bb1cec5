"""The orthonormal cosine transform (DCT-II) of many small blocks at once, and back from a few of its coefficients.

With the basis ``C[k, i] = c_k cos(pi (2 i + 1) k / (2 N))``, ``c_0 = sqrt(1 / N)`` and ``c_k = sqrt(2 / N)`` otherwise,
a block ``x`` of one dimension becomes ``C x`` and one of two dimensions ``C_a X C_b^T``. ``C`` is orthogonal, so that
the inverse is the transpose and no energy is lost or gained.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

with suppress(ImportError):  # The shapes in annotations are read by tests and type checkers alone.
    from jaxtyping import Float, Int

# Elements that are worked on at a time on a CPU: 1 MiB, so that what lies between two steps stays near the core. With
# 64 x 64 blocks the transform takes 0.65 to 0.9 of the time of all at once (benchmarks/codec.py of commit 04c1224e);
# with half of the elements encoding takes 1.06 of the time, since there are twice as many calls.
_GROUP_NUMEL = {"cpu": 1 << 18}


def groups(blocks: Float[Tensor, "num ..."]) -> Iterator[slice]:
    """Ranges of blocks that together fill a cache; on CUDA one of all."""
    num, block_numel = blocks.size(0), math.prod(blocks.shape[1:])
    size = max(1, _GROUP_NUMEL.get(blocks.device.type, num * block_numel) // max(1, block_numel))
    return (slice(start, min(start + size, num)) for start in range(0, num, size))


@cache
def dct_basis(size: int, device: torch.device, *, transposed: bool = False) -> Float[Tensor, "size size"]:
    """Rows are the cosines ``C[k]`` from low to high frequency; float32, computed in float64. Not to be changed."""
    numbers = torch.arange(size, dtype=torch.float64, device="cpu")
    angles = numbers[:, None] * (2 * numbers + 1)
    basis = torch.cos(angles * (math.pi / (2 * size))) * math.sqrt(2 / size)
    basis[0] = math.sqrt(1 / size)
    # A CPU multiplies faster with contiguous memory.
    return (basis.mT.contiguous() if transposed else basis).to(device, torch.float32)


def dct(blocks: Float[Tensor, "num ..."], *, inverse: bool = False) -> Float[Tensor, "num ..."]:
    """Coefficients of each block of one or two dimensions, ``C x`` or ``C_a X C_b^T``; ``inverse``: the way back."""
    transformed = torch.empty_like(blocks, memory_format=torch.contiguous_format)
    last = blocks.size(-1)
    right = dct_basis(last, blocks.device, transposed=not inverse)
    for group in groups(blocks):
        if blocks.ndim == 2:
            torch.mm(blocks[group], right, out=transformed[group])
        else:
            along_last = torch.mm(blocks[group].reshape(-1, last), right).view(blocks[group].shape)
            left = dct_basis(blocks.size(1), blocks.device, transposed=inverse)
            torch.matmul(left, along_last, out=transformed[group])
    return transformed


def add_sparse_inverse_dct_(
    blocks: Float[Tensor, "num ..."], values: Float[Tensor, "num few"], indices: Int[Tensor, "num few"], alpha: int = 1
) -> None:
    """Add ``alpha`` times the inverse of each block ``(num, *block_shape)`` from a few of its coefficients.

    ``indices`` say where the values are in the flattened block; of those at one index all but one are zero.
    Sums ``v C_a[r]^T C_b[c]`` over the coefficients ``v`` at ``(r, c)`` (``v C[r]`` in one dimension) while that needs
    no more multiplications than the dense transform, ``few <= a + b`` (``few <= a``). The times cross there too: at
    128 of 64 x 64.
    """
    if values.size(1) > sum(blocks.shape[1:]):
        add = _add_dense_inverse_
    else:
        add = _add_columns_ if blocks.ndim == 2 else _add_products_
    for group in groups(blocks):
        add(blocks[group], values[group], indices[group], alpha)


def _add_dense_inverse_(blocks: Tensor, values: Tensor, indices: Tensor, alpha: int) -> None:
    """Write the coefficients into zeros and transform all."""
    starts = torch.arange(0, blocks.numel(), math.prod(blocks.shape[1:]), device=blocks.device)[:, None]
    # One place more, for the zeros: they must not overwrite a coefficient at the same position.
    coefficients = blocks.new_zeros(blocks.numel() + 1)
    addresses = (indices + starts).masked_fill_(values == 0, blocks.numel())
    coefficients.index_copy_(0, addresses.view(-1), values.reshape(-1))
    blocks.add_(dct(coefficients[:-1].view(blocks.shape), inverse=True), alpha=alpha)


def _add_columns_(blocks: Tensor, values: Tensor, indices: Tensor, alpha: int) -> None:
    """``sum v C[r]`` for blocks of one dimension."""
    basis = dct_basis(blocks.size(1), blocks.device)
    blocks.add_(F.embedding_bag(indices, basis, mode="sum", per_sample_weights=values), alpha=alpha)


def _add_products_(blocks: Tensor, values: Tensor, indices: Tensor, alpha: int) -> None:
    """``sum v C_a[r]^T C_b[c]`` for blocks of two dimensions."""
    num, rows, cols = blocks.shape
    flat = indices.reshape(-1)
    left = dct_basis(rows, blocks.device).index_select(0, flat // cols).mul_(values.reshape(-1, 1))
    right = dct_basis(cols, blocks.device).index_select(0, flat % cols)
    blocks.baddbmm_(left.view(num, -1, rows).mT, right.view(num, -1, cols), alpha=alpha)
