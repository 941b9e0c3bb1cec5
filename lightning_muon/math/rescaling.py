"""NorMuon and Hyperball: updates that are rescaled by norms of neurons or of the whole matrix."""

from __future__ import annotations

import math
from contextlib import suppress

import torch
from torch import Tensor

with suppress(ImportError):  # The shapes in annotations are read by tests and type checkers alone.
    from jaxtyping import Float

# Denominator term of the published implementation (github.com/zichongli5/NorMuon, normuon.py).
_NORMUON_EPS = 1e-10
NUM_SUMS = 3  # Of hyperball_sums().


def normalize_neurons(
    update: Float[Tensor, "rows cols"], second_moment: Float[Tensor, " rows"], *, beta2: float
) -> tuple[Float[Tensor, "rows cols"], Float[Tensor, " rows"]]:
    """The NorMuon update of an orthogonalized ``update`` O, and the new second moment v of its rows; float32.

    ``v <- beta2 v + (1 - beta2) mean_cols(O^2)``, then ``O_i / (sqrt(v_i) + eps)`` for each row, scaled to the
    Frobenius norm ``sqrt(min(rows, cols))`` of an orthogonal matrix: times ``0.2 sqrt(max(rows, cols))``
    (``match_rms_adamw``) that is the paper's ``0.2 sqrt(rows cols) / |O|``. A zero matrix stays zero.

    Source: Li et al. 2025, arXiv:2510.05491, Algorithm 1.
    """
    whole = update.to(torch.float32)
    second_moment = second_moment.lerp(whole.square().mean(-1), 1 - beta2)
    whole = whole / (second_moment.sqrt() + _NORMUON_EPS).unsqueeze(-1)
    norm = whole.square().sum().sqrt() + _NORMUON_EPS
    return whole.mul_(math.sqrt(min(update.shape)) / norm), second_moment


def hyperball_sums(weight: Tensor, update: Tensor) -> Float[Tensor, " 3"]:
    """``|W|^2``, ``<W, u>`` and ``|u|^2`` of a piece; those of a whole matrix are the sums over its pieces. float32."""
    # Contiguous, so that the order of the sums, and with it the bits, depend on nothing but the shape.
    weight, update = (each.to(torch.float32).contiguous() for each in (weight, update))
    return torch.stack([(weight * weight).sum(), (weight * update).sum(), (update * update).sum()])


def hyperball_factors(
    sums: Float[Tensor, "matrices 3"], radius: Float[Tensor, " matrices"], lr: float
) -> tuple[Float[Tensor, " matrices"], Float[Tensor, " matrices"], Float[Tensor, " matrices"]]:
    """``(radius, scale, rate)`` so that ``scale W - rate u`` is the Hyperball step of each matrix.

    ``W <- R Normalize(W - lr R Normalize(u))`` in the Frobenius norm. ``sums`` are :func:`hyperball_sums` of whole
    matrices, ``radius`` is R, or 0 where it is not known: it is the norm of W then. A zero matrix stays zero.

    Source: Wen et al. 2026, arXiv:2606.16899.
    """
    squares, products, update_squares = sums.unbind(-1)
    radius = torch.where(radius > 0, radius, squares.sqrt())
    step = torch.where(update_squares > 0, lr * radius / update_squares.sqrt(), 0.0)
    norm = (squares - 2 * step * products + step.square() * update_squares).clamp(min=0).sqrt()
    scale = torch.where(norm > 0, radius / norm, 1.0)
    return radius, scale, scale * step
