"""Newton-Schulz orthogonalization, the only expensive arithmetic of Muon, and how each matrix gets it.

Symmetric products are computed by half where that is faster; on CUDA the twenty kernels of a matrix are one launch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

with suppress(ImportError):  # The shapes in annotations are read by tests and type checkers alone.
    from jaxtyping import Float
import logging
import os
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

from lightning_muon.config import AdjustLr, NsCoefficients, NsMethod, NsQuality, Quintic

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


# Coefficients (a, b, c) of each step x <- a x + b x^3 + c x^5.
JORDAN: Quintic = (3.4445, -4.7750, 2.0315)  # https://kellerjordan.github.io/posts/muon
# Polar Express for bfloat16 (Amsel et al. 2025, arXiv:2505.16932, Algorithm 1 with the changes of section 3.4), in
# which each step is the best for what the steps before it leave of the singular values in [0.001, 1]. From the tenth
# step on these lie so near 1 that the step stays the same. Computed by
# tests/reference/polar_express.py, and compared with the published ones in tests/unit/math/test_newton_schulz.py.
POLAR_EXPRESS: tuple[Quintic, ...] = (
    (8.20516041400557, -22.90193498705604, 16.460724910180307),
    (4.066395159942761, -2.8611540867551337, 0.5183995226694726),
    (3.909594904437905, -2.8233517350395063, 0.5250369769390005),
    (3.28556401719862, -2.415301959635948, 0.48529406552790877),
    (2.27787328708398, -1.6198217652654436, 0.3984807870416836),
    (1.8725756512746514, -1.2307042574884295, 0.3585161620951164),
    (1.8564371097654464, -1.2132392819372866, 0.3567997894229572),
    (1.8749999980503391, -1.2499999961006782, 0.3749999980503392),
    (1.8750000000000004, -1.2500000000000009, 0.37500000000000044),
    (1.875, -1.25, 0.375),
)
# The same for singular values in [0.01, 1], which these three take into [0.70, 1.28].
FAST: tuple[Quintic, ...] = (
    (7.910260608141099, -22.078821746018683, 15.86911373678816),
    (3.6073447007872157, -2.6466685703486, 0.5110397329749129),
    (2.6448182969901732, -1.926927609479547, 0.431511113616434),
)
# Short sides, inclusive, for which a batch is faster than one matrix after the other. CPU: 2 times as fast at 128 x 128
# and 64 x 256, 0.85 times at 512 x 512 (benchmarks/newton_schulz.py of commit 04c1224e); below 24 a batched product may
# add in another order than a single one, and on a CPU what a matrix is batched with does not change its update. CUDA:
# eight of 1536 x 1536 take 0.82 of the time of one by one, of 2048 x 2048 0.92 (an H200, `make gpu`), and the memory of
# eight. There the bits may depend on the batch, so that ranks which repeat a matrix must repeat its batch.
_BATCHED = {"cpu": (32, 256), "cuda": (1, 1536)}
# Share of the largest squared singular value that rounding may reach in a Gram matrix that is updated: at a tenth, the
# singular values come out as those of the plain iteration (tests/unit/math/test_newton_schulz.py).
_MOST_NOISE = 0.1


def orthogonalize(
    matrix: Float[Tensor, "*batch rows cols"],
    *,
    steps: Sequence[Quintic],
    eps: float,
    compute_dtype: torch.dtype,
    method: NsMethod = "plain",
) -> Float[Tensor, "*batch rows cols"]:
    """Replace the singular values of each matrix by values near 1.

    Divides by the Frobenius norm and runs ``x <- (a I + b A + c A A) x`` with ``A = x x^T`` and ``(a, b, c)`` of each
    step. Tall matrices are transposed first, so that ``A`` is always the small Gram matrix.

    The norm is at least ``eps``, so that a zero matrix stays zero, and one far smaller than ``eps`` ends near zero. A
    matrix with NaN or infinite entries becomes NaN throughout. Finite entries whose squares sum to more than float32
    holds (from about 1e19 on) have an infinite norm: the result is zero, as in torch.optim.Muon, but for float16, where
    matrices are divided by their largest entry first and any finite one is orthogonalized. Every product runs in
    ``compute_dtype``, that of the result.

    Args:
        matrix: Momentum.
        steps: Coefficients of each step.
        eps: Least norm.
        compute_dtype: bfloat16, float16 or float32.
        method: ``"plain"`` multiplies the whole matrix in each step. With the coefficients of torch.optim.Muon and
            bfloat16 one matrix has the bits of it (on CUDA, where matrices are cut into panels from a short side of
            4096 on, up to the rounding of products). ``"gram"`` iterates on ``A`` and multiplies the matrix at the end
            and wherever rounding would grow: cheaper for matrices with unequal sides, equal up to rounding.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon.
    """
    is_tall = matrix.size(-2) > matrix.size(-1)
    # In float16 small gradients are zero, and large ones infinite, until they are divided by their norm.
    dtype = torch.float32 if compute_dtype == torch.float16 else compute_dtype
    x = matrix.to(dtype, copy=True).reshape(-1, *matrix.shape[-2:])
    if x.size(0) == 1:
        # A batched product of one matrix adds in another order than that of two.
        x = x[0]
    if is_tall:
        x = x.mT
    least_norm = eps
    if compute_dtype == torch.float16:
        # Squares of entries that are at most 1 neither overflow nor vanish.
        x.div_(x.abs().amax(dim=(-2, -1), keepdim=True).clamp(min=eps))
        least_norm = 1.0
    x = x.div_(_frobenius_norm(x).clamp(min=least_norm)).to(compute_dtype)
    panels = panels_of(x)  # Before the loops, which allocate nothing.
    x = (_iterate_on_gram_matrix if method == "gram" else _iterate)(x, steps, panels)
    return (x.mT if is_tall else x).reshape(matrix.shape)


def _iterate(x: Tensor, steps: Sequence[Quintic], panels: Panels) -> Tensor:
    gram = x.new_empty((*x.shape[:-1], x.size(-2)))
    polynomial, following, spare = torch.empty_like(gram), *_targets(x)
    for a, b, c in steps:
        gram_matrix(x, panels, out=gram)
        add_square(gram, b, c, panels, out=polynomial)
        addmm(x, polynomial, x, beta=a, alpha=1.0, out=following)
        x, following, spare = following, spare, following
    return x


def _targets(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two buffers that take the new matrix by turns; the transposed copy of a tall one is slower to write to."""
    return x.new_empty(x.shape), x if x.is_contiguous() else x.new_empty(x.shape)


def _iterate_on_gram_matrix(x: Tensor, steps: Sequence[Quintic], panels: Panels) -> Tensor:
    """Result of :func:`_iterate`, up to rounding: steps turn ``A`` into ``P A P``; ``P x`` comes at the end."""
    restarts = gram_restarts(tuple(steps), x.dtype)
    gram = x.new_empty((*x.shape[:-1], x.size(-2)))
    polynomial, product, square = (torch.empty_like(gram) for _ in range(3))
    following, spare = _targets(x)
    gram_matrix(x, panels, out=gram)
    is_first = True  # Since the Gram matrix was computed from x.
    for index, (a, b, c) in enumerate(steps, 1):
        add_square(gram, b, c, panels, out=polynomial)
        polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
        ends = index in restarts or index == len(steps)
        if not ends:
            symmetric_product(polynomial, gram, panels, out=square)
            symmetric_product(square, polynomial, panels, out=gram)
        if is_first:
            product, polynomial = polynomial, product
        else:
            symmetric_product(polynomial, product, panels, out=square)
            product, square = square, product
        is_first = ends
        if ends:
            torch.matmul(product, x, out=following)
            x, following, spare = following, spare, following
        if index in restarts:
            gram_matrix(x, panels, out=gram)
    return x


@cache
def gram_restarts(steps: tuple[Quintic, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Numbers of steps after which the Gram matrix is computed from the matrix again.

    Rounding is relative to the largest eigenvalue, and each step multiplies it by at most ``a^2`` where eigenvalues are
    small. A restart comes before the noise passes a tenth of the largest eigenvalue.
    """
    rounding = torch.finfo(dtype).eps / 2
    noise, restarts = rounding, list[int]()
    for index, (a, _, _) in enumerate(steps[:-1], 1):
        noise *= a * a
        if noise > _MOST_NOISE:
            restarts.append(index)
            noise = rounding
    return tuple(restarts)


@cache
def steps_of(coefficients: NsCoefficients, num_steps: int) -> tuple[Quintic, ...]:
    """The coefficients of each step, of a name, of one triple for all steps, or as they are."""
    if coefficients == "jordan":
        return (JORDAN,) * num_steps
    if coefficients == "polar_express":
        return POLAR_EXPRESS[:num_steps] + POLAR_EXPRESS[-1:] * (num_steps - len(POLAR_EXPRESS))
    if isinstance(coefficients[0], tuple):
        return coefficients  # pyright: ignore[reportReturnType]
    return (coefficients,) * num_steps  # pyright: ignore[reportReturnType]


def worth_batching(rows: int, cols: int, device_type: str) -> bool:
    """Whether equal ``rows x cols`` matrices are orthogonalized faster as one batch than one after the other."""
    least, largest = _BATCHED.get(device_type, (1, 0))
    return least <= min(rows, cols) <= largest


@dataclass(frozen=True)
class Arithmetic:
    """Device type and dtype in which Newton-Schulz is computed; equal on all ranks."""

    device_type: str
    dtype: torch.dtype  # bfloat16, float16 or float32.


@dataclass(frozen=True)
class NewtonSchulz:
    """How one matrix is orthogonalized."""

    steps: tuple[Quintic, ...]
    dtype: torch.dtype
    method: NsMethod = "plain"

    def orthogonalize(self, matrix: Tensor, *, eps: float) -> Tensor:
        """:func:`orthogonalize` in this way."""
        return orthogonalize(matrix, steps=self.steps, eps=eps, compute_dtype=self.dtype, method=self.method)

    def flops(self, rows: int, cols: int) -> int:
        """FLOPs for one matrix: ``num_steps * 2 s^2 (2 l + s)`` with sides ``s <= l`` for the plain iteration.

        As textbooks count them, though some products are computed by half: the unit of loads and rates on any device.
        """
        short, long = sorted((rows, cols))
        num_steps = len(self.steps)
        # The Gram matrix is computed anew in each part, and the matrix multiplied. In all steps of a part but one, two
        # products update the Gram matrix, and one multiplies the polynomials.
        num_parts = num_steps if self.method == "plain" else len(gram_restarts(self.steps, self.dtype)) + 1
        num_small = num_steps + 3 * (num_steps - num_parts)
        return 2 * short * short * (2 * num_parts * long + num_small * short)


@dataclass(frozen=True)
class NewtonSchulzOptions:
    """The options of a param group for Newton-Schulz."""

    quality: NsQuality
    coefficients: NsCoefficients
    num_steps: int

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> NewtonSchulzOptions:
        """Read the options of a param group."""
        return cls(group["ns_quality"], as_tuples(group["ns_coefficients"]), group["ns_steps"])

    @cache  # noqa: B019 - as many as there are options and shapes.
    def choice(self, rows: int, cols: int, arithmetic: Arithmetic) -> NewtonSchulz:
        """The way for a ``rows x cols`` matrix, by the arguments alone, which are equal on all ranks."""
        if self.quality == "reference":
            return NewtonSchulz(steps_of(self.coefficients, self.num_steps), arithmetic.dtype)
        short, long = sorted((rows, cols))
        # By FLOPs. On the Gram matrix a step is spared the products x x^T, of which a share is computed, and P x, and
        # has three symmetric products of short sides more.
        share = share_of_full_product(short, arithmetic.device_type)
        is_on_gram_matrix = (1 + share) * long > 3 * share * short
        return NewtonSchulz(FAST, arithmetic.dtype, "gram" if is_on_gram_matrix else "plain")

    def flops(self, rows: int, cols: int, arithmetic: Arithmetic) -> int:
        """FLOPs of the choice."""
        return self.choice(rows, cols, arithmetic).flops(rows, cols)


def as_tuples(value: Any) -> Any:
    """Lists as tuples, inner ones too: files of configs and checkpoints do not tell them apart."""
    return tuple(map(as_tuples, cast("list[Any]", value))) if isinstance(value, list | tuple) else value


def _frobenius_norm(x: Tensor) -> Tensor:
    """Norm of a matrix, or of each of a batch, ``(batch, 1, 1)``."""
    if x.ndim == 3:
        # One by one, as torch.optim.Muon takes it: a reduction over two of three dimensions has other bits.
        return torch.stack([_frobenius_norm(member) for member in x.unbind()]).view(-1, 1, 1)
    return x.norm()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def lr_scale(rows: int, cols: int, adjust_lr_fn: AdjustLr, *, is_transposed: bool = False) -> float:
    """Factor on the learning rate of a ``rows x cols`` matrix; outputs are the rows, or the columns if transposed.

    ``original``: ``sqrt(max(1, outputs / inputs))`` (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon).
    ``match_rms_adamw``: ``0.2 * sqrt(max(rows, cols))``, so that the update has the root mean square of AdamW's
    (Liu et al. 2025, arXiv:2502.16982, equation 4).
    ``spectral_mup``: ``sqrt(outputs / inputs)``, so that updates of any width change outputs as much (Yang et al. 2023,
    arXiv:2310.17813, condition 1).
    """
    outputs_per_input = cols / rows if is_transposed else rows / cols
    if adjust_lr_fn == "original":
        return math.sqrt(max(1.0, outputs_per_input))
    if adjust_lr_fn == "spectral_mup":
        return math.sqrt(outputs_per_input)
    return 0.2 * math.sqrt(max(rows, cols))


# Above it the device takes longer than the host (3.5 ms at 700 TFLOP/s), and the memory of a graph is better spent.
MOST_FLOPS = 25 * 10**11
_MOST_GRAPHS = 64


_log = logging.getLogger(__name__)


def can_record(device: torch.device) -> bool:
    """Whether launches become a graph: not if the host waits for each kernel, or memory has no pools; nor on ROCm."""
    off = [os.environ.get(name, "0") for name in ("CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING")]
    return device.type == "cuda" and torch.version.hip is None and all(each in ("", "0") for each in off)


Recorded = tuple[Tensor, Callable[[], Tensor]]
"""Matrices (batch, rows, cols) to fill, and what gives their updates, with the bits of launches one by one. Updates are
overwritten by the next call."""


class NewtonSchulzGraphs:
    """The graphs of an optimizer, made when a shape comes up. They share memory, and so must run one by one."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        self._has_failed = False
        self._graphs: dict[tuple[object, ...], Recorded] = {}
        self._taken = Counter[tuple[object, ...]]()

    def close(self) -> None:
        """Free all graphs and their memory."""
        self._graphs.clear()

    def begin(self) -> None:
        """Let :meth:`take` give all graphs again: nothing that one of them has returned is needed any more."""
        self._taken.clear()

    def take(self, shape: tuple[int, int, int], newton_schulz: NewtonSchulz, *, eps: float) -> Recorded | None:
        """A graph that was not taken since :meth:`begin`; ``None`` if launches one by one are as good."""
        num, rows, cols = shape
        if self._has_failed or num * newton_schulz.flops(rows, cols) > MOST_FLOPS:
            return None
        key = (shape, newton_schulz, eps)
        self._taken[key] += 1
        numbered = (*key, self._taken[key])
        if numbered not in self._graphs and len(self._graphs) < _MOST_GRAPHS:
            try:
                self._graphs[numbered] = self._record(shape, newton_schulz, eps)
            except RuntimeError as error:  # Of memory, or of a tool that watches each kernel.
                self._has_failed = True
                _log.warning("Newton-Schulz is launched kernel by kernel, since it cannot be recorded: %s", error)
        return self._graphs.get(numbered)

    def _record(self, shape: tuple[int, int, int], newton_schulz: NewtonSchulz, eps: float) -> Recorded:
        """Record a graph; the host waits for the device."""
        matrices, graph = torch.zeros(shape, dtype=self._dtype, device=self._device), torch.cuda.CUDAGraph()

        def run() -> Tensor:
            return newton_schulz.orthogonalize(matrices, eps=eps).contiguous()  # A tall one comes out transposed.

        # A recording that fails leaves its stream the current one.
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.current_stream(self._device)):
            run()  # What is loaded and allocated at a first call must not be in a graph.
            # Other threads may go on with CUDA: those of data loaders, and NCCL's.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                updates = run()

        def replay() -> Tensor:
            graph.replay()
            return updates

        return matrices, replay
