"""Matrix products whose result is symmetric: computed by half where that is faster, and mirrored."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

# Rows of a panel of a symmetric product, and the least matrix that is cut into panels. With 192 rows on an AVX-512
# CPU the Gram matrix costs 0.87 (512 x 512), 0.73 (512 x 2048), 0.68 (1024 x 1024), 0.62 (2048 x 2048) of the full
# product in bfloat16 (benchmarks/newton_schulz.py); below 512 nothing is won. CUDA: Newton-Schulz takes 1.15 of the
# time at 2048 x 2048, 1.00 at 4096 x 4096, 0.94 at 4096 x 14336, 0.80 at 8192 x 8192 (an H200, `make gpu`).
_PANEL_ROWS = {"cpu": 192, "cuda": 1024}
_LEAST_PANELED = {"cpu": 512, "cuda": 4096}


@dataclass(frozen=True, eq=False)
class Panels:
    """Row ranges of a matrix; none if its symmetric products are computed in full."""

    ranges: tuple[tuple[int, int], ...]
    scratch: tuple[Tensor, Tensor]  # Room to mirror any of them, on a CPU.


def share_of_full_product(num_rows: int, device_type: str) -> float:
    """About the share of its time that a symmetric product of one matrix takes, because of what is not computed."""
    return 0.65 if num_rows >= _LEAST_PANELED.get(device_type, num_rows + 1) else 1.0


def panels_of(x: Tensor) -> Panels:
    """The panels of symmetric products with the rows of ``x``."""
    num_rows, device_type = x.size(-2), x.device.type
    if x.ndim == 3 or num_rows < _LEAST_PANELED.get(device_type, num_rows + 1):
        return Panels((), (x.new_empty(0), x.new_empty(0)))
    # The last panel takes a short rest of rows too: products with three rows or fewer may add in another order.
    height = _PANEL_ROWS[device_type]
    stops = [*range(height, num_rows - height // 3, height), num_rows]
    ranges = tuple(pairwise([0, *stops]))
    most = 0 if x.is_cuda else max((stop - start) * start for start, stop in ranges)
    return Panels(ranges, (x.new_empty(most), x.new_empty(most)))


def gram_matrix(x: Tensor, panels: Panels, *, out: Tensor) -> None:
    """``x x^T``; by half only what is on and below the diagonal is computed, and mirrored."""
    if not panels.ranges:
        torch.matmul(x, x.mT, out=out)
    for start, stop in panels.ranges:
        torch.mm(x[start:stop], x[:stop].mT, out=out[start:stop, :stop])
        _mirror_(out, start, stop, panels)


def symmetric_product(left: Tensor, right: Tensor, panels: Panels, *, out: Tensor) -> None:
    """``left right`` of symmetric matrices that commute; ``out`` is neither of them."""
    if not panels.ranges:
        torch.matmul(left, right, out=out)
    for start, stop in panels.ranges:
        torch.mm(left[start:stop], right[:, :stop], out=out[start:stop, :stop])
        _mirror_(out, start, stop, panels)


def add_square(gram: Tensor, b: float, c: float, panels: Panels, *, out: Tensor) -> None:
    """``b A + c A A`` for a symmetric ``A``, by panels only where that gives the bits of the full product."""
    # The CPU's float32 product rounds c A first, so that its result is not quite symmetric.
    if not panels.ranges or (gram.device.type == "cpu" and gram.dtype == torch.float32):
        addmm(gram, gram, gram, beta=b, alpha=c, out=out)
        return
    for start, stop in panels.ranges:
        panel = gram[start:stop, :stop]
        addmm(panel, gram[start:stop], gram[:, :stop], beta=b, alpha=c, out=out[start:stop, :stop])
        _mirror_(out, start, stop, panels)


def addmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float, out: Tensor) -> None:
    """``beta * bias + alpha * left @ right`` for a matrix and for a batch of them."""
    product = torch.addmm if bias.ndim == 2 else torch.baddbmm
    product(bias, left, right, beta=beta, alpha=alpha, out=out)


def _mirror_(square: Tensor, start: int, stop: int, panels: Panels) -> None:
    """Copy the rows ``start:stop`` left of the diagonal block to above it."""
    if not start:
        return
    below, above = square[start:stop, :start], square[:start, start:stop]
    if square.is_cuda:
        above.copy_(below.mT)
    else:
        # Transposing contiguous memory is up to 5 times as fast as transposing views on a CPU.
        first, second = (room[: below.numel()] for room in panels.scratch)
        copied = first.view(below.shape).copy_(below)
        above.copy_(second.view(above.shape).copy_(copied.mT))
