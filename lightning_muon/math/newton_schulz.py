"""Newton-Schulz orthogonalization: the only expensive arithmetic of Muon."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

import torch
from torch import Tensor

with suppress(ImportError):  # The shapes in annotations are read by tests and type checkers alone.
    from jaxtyping import Float

from lightning_muon.config import AdjustLr

Quintic = tuple[float, float, float]

# Rows of a panel of a symmetric product, and the least matrix that is cut into panels. With 192 rows on an AVX-512
# CPU the Gram matrix costs 0.87 (512 x 512), 0.73 (512 x 2048), 0.68 (1024 x 1024), 0.62 (2048 x 2048) of the full
# product in bfloat16 (benchmarks/newton_schulz.py); below 512 nothing is won. On CUDA a product must be large to fill
# the device: chosen, not measured.
_PANEL_ROWS = {"cpu": 192, "cuda": 1024}
_LEAST_PANELED = {"cpu": 512, "cuda": 4096}
# Short sides, inclusive, for which a batch is faster than one matrix after the other. CPU: 2 times as fast at 128 x 128
# and 64 x 256, 0.85 times at 512 x 512 (benchmarks/newton_schulz.py); below 24 a batched product may add in another
# order than a single one, and on a CPU what a matrix is batched with does not change its update. CUDA: chosen, since
# launches dominate below 1024; not measured. There the bits may depend on the batch, so that ranks which repeat a
# matrix must repeat its batch.
_BATCHED = {"cpu": (32, 256), "cuda": (1, 1024)}


def orthogonalize(
    matrix: Float[Tensor, "*batch rows cols"],
    *,
    coefficients: Quintic,
    num_steps: int,
    eps: float,
    compute_dtype: torch.dtype,
) -> Float[Tensor, "*batch rows cols"]:
    """Replace the singular values of each matrix by values near 1.

    Divides by the Frobenius norm and runs ``x <- a x + (b A + c A A) x`` with ``A = x x^T``. Tall matrices are
    transposed first, so that ``A`` is always the small Gram matrix. One matrix gives bit for bit the result of
    ``torch.optim.Muon`` when ``compute_dtype`` is bfloat16 (on CUDA, where matrices are cut into panels from a short
    side of 4096 on, up to the rounding of products).

    The norm is at least ``eps``, so that a zero matrix stays zero. Every product runs in ``compute_dtype``, that of the
    result. With the default coefficients and five steps every singular value that was above 0.01 of the norm ends in
    about [0.7, 1.2] (tests/unit/math/test_newton_schulz.py).

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon.
    """
    a, b, c = coefficients
    is_tall = matrix.size(-2) > matrix.size(-1)
    x = matrix.to(compute_dtype, copy=True).reshape(-1, *matrix.shape[-2:])
    if x.size(0) == 1:
        # A batched product of one matrix adds in another order than that of two.
        x = x[0]
    if is_tall:
        x = x.mT
    x.div_(_frobenius_norm(x).clamp(min=eps))
    panels = _panels(x)
    gram = x.new_empty((*x.shape[:-1], x.size(-2)))
    polynomial, following = torch.empty_like(gram), x.new_empty(x.shape)
    for _ in range(num_steps):
        _gram_matrix(x, panels, out=gram)
        _add_square(gram, b, c, panels, out=polynomial)
        _addmm(x, polynomial, x, beta=a, alpha=1.0, out=following)
        # The transposed copy of a tall matrix is slower to write to than contiguous memory.
        x, following = following, (x if x.is_contiguous() else torch.empty_like(following))
    return (x.mT if is_tall else x).reshape(matrix.shape)


def worth_batching(rows: int, cols: int, device_type: str) -> bool:
    """Whether equal ``rows x cols`` matrices are orthogonalized faster as one batch than one after the other."""
    least, largest = _BATCHED.get(device_type, (1, 0))
    return least <= min(rows, cols) <= largest


def newton_schulz_flops(rows: int, cols: int, num_steps: int) -> int:
    """FLOPs of :func:`orthogonalize` for one matrix: ``num_steps * 2 s^2 (2 l + s)`` with sides ``s <= l``.

    As textbooks count them, though some products are computed by half: the unit of loads and rates on any device.
    """
    short, long = sorted((rows, cols))
    return num_steps * 2 * short * short * (2 * long + short)


def _frobenius_norm(x: Tensor) -> Tensor:
    """Norm of a matrix, or of each of a batch, ``(batch, 1, 1)``."""
    if x.ndim == 3:
        # One by one, as torch.optim.Muon takes it: a reduction over two of three dimensions has other bits.
        return torch.stack([_frobenius_norm(member) for member in x.unbind()]).view(-1, 1, 1)
    return x.norm()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _panels(x: Tensor) -> list[tuple[int, int]]:
    """Row ranges in which symmetric products with the rows of ``x`` are computed; none if they are not cut."""
    num_rows, device_type = x.size(-2), x.device.type
    if x.ndim == 3 or num_rows < _LEAST_PANELED.get(device_type, num_rows + 1):
        return []
    # The last panel takes a short rest of rows too: products with three rows or fewer may add in another order.
    height = _PANEL_ROWS[device_type]
    stops = [*range(height, num_rows - height // 3, height), num_rows]
    return list(pairwise([0, *stops]))


def _gram_matrix(x: Tensor, panels: Sequence[tuple[int, int]], *, out: Tensor) -> None:
    """``x x^T``; with panels only what is on and below the diagonal is computed, and mirrored."""
    if not panels:
        torch.matmul(x, x.mT, out=out)
    for start, stop in panels:
        torch.mm(x[start:stop], x[:stop].mT, out=out[start:stop, :stop])
        _mirror_(out, start, stop)


def _add_square(gram: Tensor, b: float, c: float, panels: Sequence[tuple[int, int]], *, out: Tensor) -> None:
    """``b A + c A A`` for a symmetric ``A``, by panels as well where that gives the bits of the full product."""
    # The CPU's float32 product rounds c A first, so that its result is not quite symmetric.
    if not panels or (gram.device.type == "cpu" and gram.dtype == torch.float32):
        _addmm(gram, gram, gram, beta=b, alpha=c, out=out)
        return
    for start, stop in panels:
        panel = gram[start:stop, :stop]
        _addmm(panel, gram[start:stop], gram[:, :stop], beta=b, alpha=c, out=out[start:stop, :stop])
        _mirror_(out, start, stop)


def _mirror_(square: Tensor, start: int, stop: int) -> None:
    """Copy the rows ``start:stop`` left of the diagonal block to above it."""
    if start and square.is_cuda:
        square[:start, start:stop].copy_(square[start:stop, :start].mT)
    elif start:
        # Transposing contiguous memory is up to 14 times as fast as transposing views on a CPU.
        square[:start, start:stop] = square[start:stop, :start].contiguous().mT.contiguous()


def _addmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float, out: Tensor) -> None:
    """``beta * bias + alpha * left @ right`` for a matrix and for a batch of them."""
    product = torch.addmm if bias.ndim == 2 else torch.baddbmm
    product(bias, left, right, beta=beta, alpha=alpha, out=out)


def lr_scale(rows: int, cols: int, adjust_lr_fn: AdjustLr) -> float:
    """Factor on the learning rate of a ``rows x cols`` matrix.

    ``original``: ``sqrt(max(1, rows / cols))``, so that the update has the spectral norm of a change of the outputs
    (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon).
    ``match_rms_adamw``: ``0.2 * sqrt(max(rows, cols))``, so that the update has the root mean square of AdamW's
    (Liu et al. 2025, arXiv:2502.16982, equation 4).
    """
    if adjust_lr_fn == "original":
        return math.sqrt(max(1.0, rows / cols))
    return 0.2 * math.sqrt(max(rows, cols))
