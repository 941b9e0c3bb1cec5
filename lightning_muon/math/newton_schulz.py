"""Newton-Schulz orthogonalization: the only expensive arithmetic of Muon."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

Quintic = tuple[float, float, float]


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
    ``torch.optim.Muon`` when ``compute_dtype`` is bfloat16.

    Args:
        matrix: Momentum; not changed.
        coefficients: ``(a, b, c)``, equal in every step.
        num_steps: Number of iterations.
        eps: Lower bound of the norm, so that a zero matrix stays zero.
        compute_dtype: Every product runs in it.

    Returns:
        Same shape, ``compute_dtype``. With the default coefficients and five steps every singular value that was
        above 0.01 of the norm ends in about [0.7, 1.2] (tests/unit/math/test_newton_schulz.py).

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon.
    """
    a, b, c = coefficients
    is_tall = matrix.size(-2) > matrix.size(-1)
    x = matrix.to(compute_dtype, copy=True)
    if is_tall:
        x = x.mT
    x.div_(_frobenius_norm(x).clamp(min=eps))
    for _ in range(num_steps):
        gram = x @ x.mT
        polynomial = _addmm(gram, gram, gram, beta=b, alpha=c)
        x = _addmm(x, polynomial, x, beta=a, alpha=1.0)
    return x.mT if is_tall else x


def newton_schulz_flops(rows: int, cols: int, num_steps: int) -> int:
    """Floating-point operations of :func:`orthogonalize` for one matrix.

    Per step, with sides ``s <= l``: ``2 s s l`` for the Gram matrix, ``2 s s s`` for its square and ``2 s s l`` for
    the last product, so ``num_steps * 2 s^2 (2 l + s)``.
    """
    short, long = sorted((rows, cols))
    return num_steps * 2 * short * short * (2 * long + short)


def _frobenius_norm(x: Tensor) -> Tensor:
    # The norm of a single matrix is taken as torch.optim.Muon takes it: another reduction order has other bits.
    return x.norm() if x.ndim == 2 else x.norm(dim=(-2, -1), keepdim=True)


def _addmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float) -> Tensor:
    """``beta * bias + alpha * left @ right`` for matrices and for batches of them."""
    if left.ndim == 2:
        return torch.addmm(bias, left, right, beta=beta, alpha=alpha)
    flat = [tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (bias, left, right)]
    return torch.baddbmm(*flat, beta=beta, alpha=alpha).view(bias.shape)
