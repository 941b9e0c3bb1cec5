"""Symmetric products on CUDA by a Triton kernel: one triangle of tiles is computed and mirrored. Needs ``triton``.

It waits here until a card has shown that Newton-Schulz gains by it: ``make gpu`` measures it beside cuBLAS.
Tiles and the order of every sum depend on the dtype alone: a matrix has the same bits alone and in a batch, and on any
rank with the same kind of device.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows and columns of a tile, terms of a sum at a time, warps: some 64 KiB of shared memory as compiled for sm_80, which
# cards from sm_75 on have. Chosen, not measured.
_TILES = {torch.bfloat16: (128, 64, 8), torch.float16: (128, 64, 8), torch.float32: (64, 32, 4)}


@triton.jit
def _triangle(
    left,
    right,
    bias,
    out,
    alpha,
    beta,
    num_rows,
    num_terms,
    left_b,
    left_r,
    left_k,
    right_b,
    right_k,
    right_c,
    bias_b,
    bias_r,
    bias_c,
    out_b,
    out_r,
    out_c,
    HAS_BIAS: tl.constexpr,
    WIDENS: tl.constexpr,
    TILE: tl.constexpr,
    TERMS: tl.constexpr,
):
    """One tile on or below the diagonal, and its mirror image. ``*_b``, ``*_r``, ``*_k``, ``*_c`` are strides."""
    row_tile, col_tile, number = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if col_tile > row_tile:
        return
    # 64 bits: a matrix may have more than 2^31 elements.
    rows = (row_tile * TILE + tl.arange(0, TILE)).to(tl.int64)
    cols = (col_tile * TILE + tl.arange(0, TILE)).to(tl.int64)
    terms = tl.arange(0, TERMS).to(tl.int64)
    in_rows, in_cols = rows < num_rows, cols < num_rows
    left_at = left + number * left_b + rows[:, None] * left_r + terms[None, :] * left_k
    right_at = right + number * right_b + terms[:, None] * right_k + cols[None, :] * right_c
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, num_terms, TERMS):
        in_terms = terms < num_terms - start
        a = tl.load(left_at, mask=in_rows[:, None] & in_terms[None, :], other=0.0)
        b = tl.load(right_at, mask=in_terms[:, None] & in_cols[None, :], other=0.0)
        if WIDENS:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision="ieee")
        left_at += TERMS * left_k
        right_at += TERMS * right_k
    total *= alpha
    inside = in_rows[:, None] & in_cols[None, :]
    if HAS_BIAS:
        at = bias + number * bias_b + rows[:, None] * bias_r + cols[None, :] * bias_c
        total += beta * tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if row_tile == col_tile:  # Exactly symmetric, in whatever order a tile adds.
        total = tl.where(rows[:, None] >= cols[None, :], total, tl.trans(total))
    result = total.to(out.dtype.element_ty)
    out += number * out_b
    tl.store(out + rows[:, None] * out_r + cols[None, :] * out_c, result, mask=inside)
    if row_tile != col_tile:
        mirrored = in_cols[:, None] & in_rows[None, :]
        tl.store(out + cols[:, None] * out_r + rows[None, :] * out_c, tl.trans(result), mask=mirrored)


def symmetric_addmm(
    left: Tensor, right: Tensor, *, out: Tensor, bias: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0
) -> None:
    """``beta * bias + alpha * left @ right`` into ``out``, for results that are symmetric in exact arithmetic.

    Of shapes ``(*batch, rows, sum)`` and ``(*batch, sum, rows)`` with at most one dimension of a batch, any strides,
    and one dtype: bfloat16, float16 or float32 (without TF32). Sums and scaling are in float32. ``out`` is none of the
    others, and exactly symmetric.
    """
    if left.ndim == 2:
        left, right, out = left[None], right[None], out[None]
        bias = None if bias is None else bias[None]
    num, num_rows, num_terms = left.shape
    tile, terms, warps = _TILES[left.dtype]
    number = triton.cdiv(num_rows, tile)
    added = out if bias is None else bias
    launch = cast("Any", _triangle)[(number, number, num)]
    launch(
        left,
        right,
        added,
        out,
        alpha,
        beta,
        num_rows,
        num_terms,
        *left.stride(),
        *right.stride(),
        *added.stride(),
        *out.stride(),
        HAS_BIAS=bias is not None,
        # Triton's interpreter would multiply the bit patterns (github.com/triton-lang/triton/issues/11584).
        WIDENS=left.dtype == torch.bfloat16 and not isinstance(_triangle, triton.JITFunction),
        TILE=tile,
        TERMS=terms,
        num_warps=warps,
        num_stages=3,
    )
