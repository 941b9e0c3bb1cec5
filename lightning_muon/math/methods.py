"""How each matrix is orthogonalized: coefficients and method, the cheapest that keep a promise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from lightning_muon.config import MuonEq, MuonPlus, NsCoefficients, NsMethod, NsQuality, Quintic
from lightning_muon.math.coefficients import band, steps_of
from lightning_muon.math.newton_schulz import gram_restarts, orthogonalize
from lightning_muon.math.normalize import equilibrated, normalized
from lightning_muon.math.symmetric import kernel_wins, share_of_full_product

# Of singular values from 0.01 of the norm on, those below may stay small: that of ns_quality="fast" has room for the
# default coefficients, which end in [0.68, 1.14] (benchmarks/newton_schulz.py).
_LEAST_SINGULAR_VALUE = 0.01
_FAST = (0.65, 1.35)
# Not "cans": on the Gram matrix in bfloat16, rounding takes some values below its band.
_CANDIDATES: tuple[tuple[NsCoefficients, int], ...] = (
    ("cubic", 5),
    ("you", 5),
    ("jordan", 5),
    *(("polar_express", num_steps) for num_steps in range(3, 9)),
    ("deepseek_v4", 10),
)


@dataclass(frozen=True)
class NewtonSchulz:
    """How one matrix is orthogonalized."""

    steps: tuple[Quintic, ...]
    method: NsMethod = "plain"
    by_kernel: bool = False  # Symmetric products by a Triton kernel.
    muon_eq: MuonEq = "none"
    muon_plus: MuonPlus = "none"

    def orthogonalize(
        self, matrix: Tensor, *, eps: float, compute_dtype: torch.dtype, is_transposed: bool = False
    ) -> Tensor:
        """:func:`lightning_muon.math.newton_schulz.orthogonalize`, with what comes before and after it.

        ``is_transposed``: The matrix is stored as (inputs, outputs), so that its columns are what papers call rows.
        """
        update = orthogonalize(
            equilibrated(matrix, self.muon_eq, is_transposed=is_transposed),
            steps=self.steps,
            eps=eps,
            compute_dtype=compute_dtype,
            method=self.method,
            by_kernel=self.by_kernel,
        )
        return normalized(update, self.muon_plus, is_transposed=is_transposed)

    def flops(self, rows: int, cols: int, dtype: torch.dtype, *, symmetric: float = 1.0) -> float:
        """FLOPs in ``dtype``; products whose result is symmetric count as the share ``symmetric`` of full ones."""
        short, long = sorted((rows, cols))
        square = 2 * short**3
        whole = 2 * short * short * long
        num_squares = sum(1 for _, _, c in self.steps if c)
        if self.method == "plain":
            return len(self.steps) * whole * (1 + symmetric) + num_squares * square * symmetric
        num_parts = len(gram_restarts(self.steps, dtype)) + 1
        # Two to update the Gram matrix and one for the product of polynomials, in all steps of a part but one.
        num_squares += 3 * (len(self.steps) - num_parts)
        return num_parts * whole * (1 + symmetric) + num_squares * square * symmetric


@dataclass(frozen=True)
class NewtonSchulzOptions:
    """What a param group says of Newton-Schulz."""

    quality: NsQuality
    coefficients: NsCoefficients
    num_steps: int
    muon_eq: MuonEq = "none"
    muon_plus: MuonPlus = "none"

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> NewtonSchulzOptions:
        """Those of a param group."""
        return cls(
            _tuples(group["ns_quality"]),
            _tuples(group["ns_coefficients"]),
            group["ns_steps"],
            group["muon_eq"],
            group["muon_plus"],
        )

    @cache  # noqa: B019 - as many as there are options and shapes.
    def choice(self, rows: int, cols: int, dtype: torch.dtype, device_type: str) -> NewtonSchulz:
        """The cheapest for a ``rows x cols`` matrix, by FLOPs.

        It depends on the arguments and, for the kernel, on the name of the card: all ranks choose the same.
        """
        if self.quality == "reference":
            steps = steps_of(self.coefficients, self.num_steps)
            return NewtonSchulz(steps, muon_eq=self.muon_eq, muon_plus=self.muon_plus)
        allowed = _FAST if isinstance(self.quality, str) else self.quality
        short = min(rows, cols)
        share = share_of_full_product(short, device_type)
        cheapest = min(_candidates(allowed), key=lambda each: each.flops(rows, cols, dtype, symmetric=share))
        by_kernel = kernel_wins(short, dtype, device_type)
        return replace(cheapest, by_kernel=by_kernel, muon_eq=self.muon_eq, muon_plus=self.muon_plus)

    def flops(self, rows: int, cols: int, dtype: torch.dtype, device_type: str) -> int:
        """FLOPs of the choice, as textbooks count them: the unit of loads and rates on any device."""
        return int(self.choice(rows, cols, dtype, device_type).flops(rows, cols, dtype))


def _tuples(value: Any) -> Any:
    """Tuples in the place of the lists that configuration files have."""
    return tuple(map(_tuples, cast("list[Any]", value))) if isinstance(value, list | tuple) else value


@cache
def _candidates(allowed: tuple[float, float]) -> tuple[NewtonSchulz, ...]:
    found: list[NewtonSchulz] = []
    for coefficients, num_steps in _CANDIDATES:
        steps = steps_of(coefficients, num_steps)
        least, largest = band(steps, _LEAST_SINGULAR_VALUE)
        if allowed[0] <= least and largest <= allowed[1]:
            found += [NewtonSchulz(steps, "plain"), NewtonSchulz(steps, "gram")]
    return tuple(found)
