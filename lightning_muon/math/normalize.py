"""Lengths of rows and columns, made equal before Newton-Schulz (MuonEq) or after it (Muon+)."""

from __future__ import annotations

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
