"""Lengths of rows and columns before and after Newton-Schulz; updates that NorMuon and Hyperball rescale."""

from __future__ import annotations

import math
from contextlib import suppress

import torch
from torch import Tensor

with suppress(ImportError):  # The shapes in annotations are read by tests and type checkers alone.
    from jaxtyping import Float

from lightning_muon.config import MuonEq, MuonPlus

# Added to squared lengths, as in the code of the papers: https://github.com/MaeChd/muon-eq, optim/muoneq.py, and
# https://github.com/K1seki221/MuonPlus, optim/muon_plus.py.
_EPS_BEFORE, _EPS_AFTER = 1e-8, 1e-7
_TINY = torch.finfo(torch.float32).tiny


def equilibrated(
    matrix: Float[Tensor, "*batch rows cols"], variant: MuonEq, *, is_transposed: bool = False
) -> Float[Tensor, "*batch rows cols"]:
    """The momentum with rows and columns of equal lengths, in float32; as it is for ``"none"``.

    With ``r`` and ``c`` the squared lengths of the rows and of the columns of ``M``: ``"R"`` is
    ``diag(r + eps)^(-1/2) M``, ``"C"`` is ``M diag(c + eps)^(-1/2)``, and ``"RC"`` has both factors, each of the given
    ``M``. ``M`` is first divided by its largest entry, which changes nothing but the meaning of ``eps = 1e-8``:
    gradients are often so small that it would outweigh their squares. A zero matrix stays zero.

    Args:
        matrix: Momentum, or the look-ahead on it.
        variant: Names of the paper; its default for hidden layers is ``"R"``.
        is_transposed: ``matrix`` is the transposed one of the formulas.

    Source: Chang et al. 2026, arXiv:2603.28254; exponents and ``eps`` are those of the authors' code.
    """
    if variant == "none":
        return matrix
    x = matrix.to(torch.float32, copy=True)
    x.div_(x.abs().amax(dim=(-2, -1), keepdim=True).clamp(min=_TINY))
    sides = {"R": ("row",), "C": ("col",), "RC": ("row", "col")}[variant]
    for factor in [_inverse_lengths(x, _dim(side, is_transposed), _EPS_BEFORE) for side in sides]:
        x.mul_(factor)
    return x


def normalized(
    update: Float[Tensor, "*batch rows cols"], variant: MuonPlus, *, is_transposed: bool = False
) -> Float[Tensor, "*batch rows cols"]:
    """The orthogonalized update with rows or columns of length 1, in its dtype; as it is for ``"none"``.

    ``"row"`` is ``diag(r + eps)^(-1/2) U`` with the squared lengths ``r`` of the rows and ``eps = 1e-7``, ``"col"`` the
    same of the columns; ``"col_row"`` does first the columns, then the rows, after which the rows have length 1 and the
    columns about equal lengths. The arithmetic is float32. A zero row stays zero.

    Source: Zhang et al. 2026, arXiv:2602.21545; order and ``eps`` are those of the authors' code.
    """
    if variant == "none":
        return update
    x = update.to(torch.float32)
    for side in variant.split("_"):
        x = x * _inverse_lengths(x, _dim(side, is_transposed), _EPS_AFTER)
    return x.to(update.dtype)


def _dim(side: str, is_transposed: bool) -> int:
    """The dimension over which the squares of each row, or of each column, are added."""
    return -1 if (side == "row") != is_transposed else -2


def _inverse_lengths(x: Tensor, dim: int, eps: float) -> Tensor:
    return x.square().sum(dim=dim, keepdim=True).add_(eps).rsqrt_()


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
