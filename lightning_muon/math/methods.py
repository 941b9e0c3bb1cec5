"""How each matrix is orthogonalized: coefficients, method and dtype, the cheapest that keep a promise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from lightning_muon.config import MuonEq, MuonPlus, NsCoefficients, NsMethod, NsQuality, Quintic
from lightning_muon.math.coefficients import band, polar_express, steps_of
from lightning_muon.math.newton_schulz import gram_restarts, orthogonalize
from lightning_muon.math.normalize import equilibrated, normalized
from lightning_muon.math.product_costs import MeasuredCosts, Product, ProductCost, Variant, product_flops
from lightning_muon.math.symmetric import share_of_full_product

# Of singular values from 0.01 of the norm on, those below may stay small: that of ns_quality="fast" has room for the
# default coefficients, which end in [0.68, 1.14] (benchmarks/newton_schulz.py).
_LEAST_SINGULAR_VALUE = 0.01
_FAST = (0.65, 1.35)
# Seconds are measured on machines that do other work too: below this share of them another choice is faster for sure.
_CLEARLY_FASTER = 0.9


@dataclass(frozen=True)
class NewtonSchulz:
    """How one matrix is orthogonalized."""

    steps: tuple[Quintic, ...]
    dtype: torch.dtype  # bfloat16, float16 or float32.
    method: NsMethod = "plain"
    by_kernel: bool = False  # Symmetric products by a Triton kernel.
    muon_eq: MuonEq = "none"
    muon_plus: MuonPlus = "none"

    def orthogonalize(self, matrix: Tensor, *, eps: float, is_transposed: bool = False) -> Tensor:
        """:func:`lightning_muon.math.newton_schulz.orthogonalize`, with what comes before and after it.

        ``is_transposed``: The matrix is stored as (inputs, outputs), so that its columns are what papers call rows.
        """
        update = orthogonalize(
            equilibrated(matrix, self.muon_eq, is_transposed=is_transposed),
            steps=self.steps,
            eps=eps,
            compute_dtype=self.dtype,
            method=self.method,
            by_kernel=self.by_kernel,
        )
        return normalized(update, self.muon_plus, is_transposed=is_transposed)

    def num_products(self) -> dict[Product, int]:
        """How often each product is computed."""
        num_steps, num_squares = len(self.steps), sum(1 for _, _, c in self.steps if c)
        # The Gram matrix is computed anew in each part. In all steps of a part but one, two products update it, and
        # one multiplies the polynomials.
        num_parts = num_steps if self.method == "plain" else len(gram_restarts(self.steps, self.dtype)) + 1
        num_symmetric = 3 * (num_steps - num_parts)
        return {"gram": num_parts, "square": num_squares, "symmetric": num_symmetric, "whole": num_parts}

    def cost(self, of_product: ProductCost) -> float:
        """Cost of all products."""
        return sum(number * of_product[product] for product, number in self.num_products().items())

    def flops(self, rows: int, cols: int) -> float:
        """FLOPs of all products, counted in full, although symmetric ones are computed by half."""
        return self.cost(product_flops(rows, cols))


@dataclass(frozen=True)
class Arithmetic:
    """Device type and dtype in which Newton-Schulz is computed; equal on all ranks."""

    device_type: str
    dtype: torch.dtype
    costs: MeasuredCosts | None = None  # Of its products on this machine.
    # Dtypes that may be chosen, too, where products in them were measured to be faster.
    others: tuple[torch.dtype, ...] = ()


@dataclass(frozen=True)
class NewtonSchulzOptions:
    """The options of a param group for Newton-Schulz."""

    quality: NsQuality
    coefficients: NsCoefficients
    num_steps: int
    muon_eq: MuonEq = "none"
    muon_plus: MuonPlus = "none"

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> NewtonSchulzOptions:
        """Read the options of a param group."""
        return cls(
            as_tuples(group["ns_quality"]),
            as_tuples(group["ns_coefficients"]),
            group["ns_steps"],
            group["muon_eq"],
            group["muon_plus"],
        )

    @cache  # noqa: B019 - as many as there are options and shapes.
    def choice(self, rows: int, cols: int, arithmetic: Arithmetic) -> NewtonSchulz:
        """The cheapest for a ``rows x cols`` matrix: by FLOPs, or another one that was measured to be clearly faster.

        It depends on the arguments alone, which are equal on all ranks and in each restart; nothing is measured here.
        """
        if self.quality == "reference":
            found = NewtonSchulz(steps_of(self.coefficients, self.num_steps), arithmetic.dtype)
        else:
            found = _cheapest(_FAST if isinstance(self.quality, str) else self.quality, rows, cols, arithmetic)
        return replace(found, muon_eq=self.muon_eq, muon_plus=self.muon_plus)

    def flops(self, rows: int, cols: int, arithmetic: Arithmetic) -> int:
        """FLOPs of the choice, as textbooks count them: the unit of loads and rates on any device."""
        return int(self.choice(rows, cols, arithmetic).flops(rows, cols))


def as_tuples(value: Any) -> Any:
    """Lists as tuples, inner ones too: files of configs and checkpoints do not tell them apart."""
    return tuple(map(as_tuples, cast("list[Any]", value))) if isinstance(value, list | tuple) else value


def _cheapest(allowed: tuple[float, float], rows: int, cols: int, arithmetic: Arithmetic) -> NewtonSchulz:
    share = share_of_full_product(min(rows, cols), arithmetic.device_type)
    flops = product_flops(rows, cols, symmetric=share)
    fewest = min(candidates(allowed, arithmetic.dtype), key=lambda each: each.cost(flops))
    seconds: dict[NewtonSchulz, float] = {}
    for dtype in (arithmetic.dtype, *arithmetic.others):
        for by_kernel in (False, True):
            measured = arithmetic.costs and arithmetic.costs.of(rows, cols, Variant(dtype, by_kernel))
            if measured:
                of_variant = candidates(allowed, dtype, by_kernel=by_kernel)
                seconds |= {each: each.cost(measured) for each in of_variant}
    if fewest not in seconds:
        return fewest
    fastest = min(seconds, key=seconds.__getitem__)
    return fastest if seconds[fastest] < _CLEARLY_FASTER * seconds[fewest] else fewest


@cache
def candidates(
    allowed: tuple[float, float], dtype: torch.dtype, *, by_kernel: bool = False
) -> tuple[NewtonSchulz, ...]:
    """All that take singular values from 0.01 of the norm on into a band."""
    keeping: list[tuple[Quintic, ...]] = []
    for steps in _all_steps():
        least, largest = band(steps, _LEAST_SINGULAR_VALUE)
        if allowed[0] <= least and largest <= allowed[1]:
            keeping.append(steps)
    return tuple(
        NewtonSchulz(steps, dtype, method, by_kernel)
        for steps in keeping
        for method in cast("tuple[NsMethod, ...]", ("plain", "gram"))
    )


@cache
def _all_steps() -> tuple[tuple[Quintic, ...], ...]:
    """Polar Express for just the singular values of the promise, so that fewer steps do, and what was published.

    Not ``"cans"``: on the Gram matrix in bfloat16, rounding takes some values below its band.
    """
    made = [polar_express(num_steps, _LEAST_SINGULAR_VALUE) for num_steps in range(2, 7)]
    return (*made, steps_of("cubic", 5), steps_of("you", 5), steps_of("jordan", 5), steps_of("deepseek_v4", 10))
