"""NorMuon: orthogonalized updates whose rows have equal lengths on average over the steps."""

from __future__ import annotations

import math
from contextlib import suppress

import torch
from torch import Tensor

with suppress(ImportError):  # The shapes in annotations are read by tests and type checkers alone.
    from jaxtyping import Float

# Denominator term of the published implementation (github.com/zichongli5/NorMuon, normuon.py).
_EPS = 1e-10


def normalize_neurons_(
    update: Float[Tensor, "rows cols"], second_moment: Float[Tensor, " rows"], *, beta2: float
) -> Float[Tensor, "rows cols"]:
    """The NorMuon update of an orthogonalized ``update`` O; changes the ``second_moment`` v of its rows; float32.

    ``v <- beta2 v + (1 - beta2) mean_cols(O^2)``, then ``O_i / (sqrt(v_i) + eps)`` for each row, scaled to the
    Frobenius norm ``sqrt(min(rows, cols))`` of an orthogonal matrix: times ``0.2 sqrt(max(rows, cols))``
    (``match_rms_adamw``) that is the paper's ``0.2 sqrt(rows cols) / |O|``. A zero matrix stays zero.

    Source: Li et al. 2025, arXiv:2510.05491, Algorithm 1.
    """
    whole = update.to(torch.float32)
    second_moment.lerp_(whole.square().mean(-1), 1 - beta2)
    whole = whole / (second_moment.sqrt() + _EPS).unsqueeze(-1)
    norm = whole.square().sum().sqrt() + _EPS
    return whole.mul_(math.sqrt(min(update.shape)) / norm)
