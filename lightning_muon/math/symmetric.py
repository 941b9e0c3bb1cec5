"""Matrix products whose result is symmetric: computed by half where that is faster, and mirrored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import pairwise

import torch
from torch import Tensor

# Rows of a panel of a symmetric product, and the least matrix that is cut into panels. With 192 rows on an AVX-512
# CPU the Gram matrix costs 0.87 (512 x 512), 0.73 (512 x 2048), 0.68 (1024 x 1024), 0.62 (2048 x 2048) of the full
# product in bfloat16 (benchmarks/newton_schulz.py); below 512 nothing is won. On CUDA a product must be large to fill
# the device: chosen, not measured.
_PANEL_ROWS = {"cpu": 192, "cuda": 1024}
_LEAST_PANELED = {"cpu": 512, "cuda": 4096}
# Name of a card and dtype -> the least rows from which the kernel takes at most 0.9 of the time of the products below,
# as `make gpu` measures it. By name, not by a clock when a plan is made: replicas that repeat a matrix must have the
# same bits, and not all of them plan together. No card has been measured.
_KERNEL_WINS: dict[tuple[str, torch.dtype], int] = {}
Panels = Sequence[tuple[int, int]]
Kernel = Callable[..., None]  # `symmetric_addmm` of symmetric_kernel.py.


def share_of_full_product(num_rows: int, device_type: str) -> float:
    """About the share of its time that a symmetric product of one matrix takes, because of what is not computed."""
    return 0.65 if num_rows >= _LEAST_PANELED.get(device_type, num_rows + 1) else 1.0


def halves_of(x: Tensor, *, by_kernel: bool) -> Panels | Kernel:
    """How symmetric products with the rows of ``x`` are computed by half: a kernel, or row ranges.

    There are no row ranges if they are computed in full.
    """
    if by_kernel:
        from lightning_muon.math.symmetric_kernel import symmetric_addmm  # noqa: PLC0415 - triton is optional.

        return symmetric_addmm
    return _panels_of(x)


def kernel_wins(num_rows: int, dtype: torch.dtype, device_type: str) -> bool:
    """Whether the kernel is known to be faster for so many rows; alike on all ranks with the same kind of card."""
    if device_type != "cuda" or not torch.cuda.is_available() or find_spec("triton") is None:
        return False
    least = _KERNEL_WINS.get((torch.cuda.get_device_name(), dtype))
    return least is not None and num_rows >= least


def _panels_of(x: Tensor) -> Panels:
    num_rows, device_type = x.size(-2), x.device.type
    if x.ndim == 3 or num_rows < _LEAST_PANELED.get(device_type, num_rows + 1):
        return []
    # The last panel takes a short rest of rows too: products with three rows or fewer may add in another order.
    height = _PANEL_ROWS[device_type]
    stops = [*range(height, num_rows - height // 3, height), num_rows]
    return list(pairwise([0, *stops]))


def gram_matrix(x: Tensor, halves: Panels | Kernel, *, out: Tensor) -> None:
    """``x x^T``; by half only what is on and below the diagonal is computed, and mirrored."""
    if callable(halves):
        halves(x, x.mT, out=out)
        return
    if not halves:
        torch.matmul(x, x.mT, out=out)
    for start, stop in halves:
        torch.mm(x[start:stop], x[:stop].mT, out=out[start:stop, :stop])
        _mirror_(out, start, stop)


def symmetric_product(left: Tensor, right: Tensor, halves: Panels | Kernel, *, out: Tensor) -> None:
    """``left right`` of symmetric matrices that commute; ``out`` is neither of them."""
    if callable(halves):
        halves(left, right, out=out)
        return
    if not halves:
        torch.matmul(left, right, out=out)
    for start, stop in halves:
        torch.mm(left[start:stop], right[:, :stop], out=out[start:stop, :stop])
        _mirror_(out, start, stop)


def add_square(gram: Tensor, b: float, c: float, halves: Panels | Kernel, *, out: Tensor) -> None:
    """``b A + c A A`` for a symmetric ``A``, by panels only where that gives the bits of the full product."""
    if callable(halves):
        halves(gram, gram, out=out, bias=gram, beta=b, alpha=c)
        return
    # The CPU's float32 product rounds c A first, so that its result is not quite symmetric.
    if not halves or (gram.device.type == "cpu" and gram.dtype == torch.float32):
        addmm(gram, gram, gram, beta=b, alpha=c, out=out)
        return
    for start, stop in halves:
        panel = gram[start:stop, :stop]
        addmm(panel, gram[start:stop], gram[:, :stop], beta=b, alpha=c, out=out[start:stop, :stop])
        _mirror_(out, start, stop)


def addmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float, out: Tensor) -> None:
    """``beta * bias + alpha * left @ right`` for a matrix and for a batch of them."""
    product = torch.addmm if bias.ndim == 2 else torch.baddbmm
    product(bias, left, right, beta=beta, alpha=alpha, out=out)


def _mirror_(square: Tensor, start: int, stop: int) -> None:
    """Copy the rows ``start:stop`` left of the diagonal block to above it."""
    if start and square.is_cuda:
        square[:start, start:stop].copy_(square[start:stop, :start].mT)
    elif start:
        # Transposing contiguous memory is up to 14 times as fast as transposing views on a CPU.
        square[:start, start:stop] = square[start:stop, :start].contiguous().mT.contiguous()
