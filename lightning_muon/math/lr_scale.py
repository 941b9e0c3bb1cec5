"""How the learning rate of a matrix depends on its shape."""

from __future__ import annotations

import math

from lightning_muon.config import AdjustLr


def lr_scale(rows: int, cols: int, adjust_lr_fn: AdjustLr) -> float:
    """Factor on the learning rate of a ``rows x cols`` matrix.

    ``original``: ``sqrt(max(1, rows / cols))``, so that the update has the spectral norm of a change of the outputs
    (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon).
    ``match_rms_adamw``: ``0.2 * sqrt(max(rows, cols))``, so that the update has the root mean square of AdamW's
    (Liu et al. 2025, arXiv:2502.16982, equation 4).
    """
    if adjust_lr_fn == "original":
        return math.sqrt(max(1.0, rows / cols))
    if adjust_lr_fn != "match_rms_adamw":
        raise ValueError(f"adjust_lr_fn must be 'original' or 'match_rms_adamw', got {adjust_lr_fn!r}")
    return 0.2 * math.sqrt(max(rows, cols))
