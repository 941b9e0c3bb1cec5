"""Coefficients ``(a, b, c)`` of each Newton-Schulz step ``x <- a x + b x^3 + c x^5``, published and computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import cast

import torch
from torch import linalg

from lightning_muon.config import NsCoefficients, Quintic

_JORDAN: Quintic = (3.4445, -4.7750, 2.0315)  # https://kellerjordan.github.io/posts/muon
# https://leloykun.github.io/ponder/muon-opt-coeffs, found by You Jiacheng.
_YOU = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
# Grishina et al. 2025, arXiv:2506.10935: Remez on an interval that adapts.
_CANS = (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
)
# arXiv:2606.00371: no fifth power, so that a step has one product less; for singular values from 0.007 on.
_CUBIC = (
    (3.3656576, -3.3420992, 0.0),
    (2.5744352, -1.4957376, 0.0),
    (2.5368962, -1.4312570, 0.0),
    (2.4418906, -1.2764040, 0.0),
    (2.2230472, -0.9630650, 0.0),
)
_DEEPSEEK_V4 = (*[_JORDAN] * 8, *[(2.0, -1.5, 0.5)] * 2)  # DeepSeek-V4 report: the last two converge to 1.

# Polar Express for bfloat16 (Amsel et al. 2025, arXiv:2505.16932, section 3.4 and its listing): the least singular
# value that is aimed at, the least quotient of an interval's ends, and how far rounding may carry a value above it.
_LEAST, _CUSHION, _SAFETY, _NUM_SAFE = 1e-3, 0.02407327424182761, 1.01, 7


def _divided_first(steps: Sequence[Quintic]) -> tuple[Quintic, ...]:
    """The steps after a division of singular values by 1.01.

    These are made for values up to 1, and rounding to bfloat16 takes the one of a matrix of rank one up to 1.008.
    Beyond 1 ``"cubic"`` turns its sign and ``"cans"`` diverges.
    """
    a, b, c = steps[0]
    return (a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5), *steps[1:]


_PUBLISHED = {
    "you": _YOU,
    "cans": _divided_first(_CANS),
    "cubic": _divided_first(_CUBIC),
    "deepseek_v4": _DEEPSEEK_V4,
}


@cache
def steps_of(coefficients: NsCoefficients, num_steps: int) -> tuple[Quintic, ...]:
    """The coefficients of each step, of a name, of one triple for all steps, or as they are."""
    if coefficients == "jordan":
        return (_JORDAN,) * num_steps
    if coefficients == "polar_express":
        return polar_express(num_steps)
    if isinstance(coefficients, str):
        return _PUBLISHED[coefficients]
    if isinstance(coefficients[0], tuple):
        return coefficients  # pyright: ignore[reportReturnType]
    return (coefficients,) * num_steps  # pyright: ignore[reportReturnType]


def polar_express(num_steps: int, least: float = _LEAST) -> tuple[Quintic, ...]:
    """Steps each of which is the best for what the steps before it have left of the singular values in [least, 1].

    The first seven are scaled so that values up to 1.01 stay in the interval. Source: arXiv:2505.16932, Algorithm 1.
    """
    steps: list[Quintic] = []
    lower, upper = least, 1.0
    for index in range(num_steps):
        a, b, c = best_quintic(max(lower, _CUSHION * upper), upper)
        if lower < _CUSHION * upper:  # Centered around 1 on the whole interval again.
            scale = 2 / (_value((a, b, c), lower) + _value((a, b, c), upper))
            a, b, c = scale * a, scale * b, scale * c
        lower = _value((a, b, c), lower)
        upper = 2 - lower
        safety = _SAFETY if index < _NUM_SAFE else 1.0
        steps.append((a / safety, b / safety**3, c / safety**5))
    return tuple(steps)


def best_quintic(lower: float, upper: float) -> Quintic:
    """The odd polynomial of degree 5 that is nearest to 1 on an interval, by the Remez algorithm.

    It errs by as much, and in turn, at four points: both ends and its two extrema between them.
    """
    if lower > (1 - 5e-6) * upper:  # The limit, a Pade approximation; the equations below are singular.
        return 15 / 8 / upper, -10 / 8 / upper**3, 3 / 8 / upper**5
    inner = [(3 * lower + upper) / 4, (lower + 3 * upper) / 4]
    error, last = 1.0, math.inf
    a, b, c = 0.0, 0.0, 0.0
    while abs(last - error) > 1e-15:
        last = error
        rows = [[x, x**3, x**5, (-1.0) ** index] for index, x in enumerate([lower, *inner, upper])]
        a, b, c, error = _solve(rows)
        root = math.sqrt(9 * b * b - 20 * a * c)
        inner = [math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))]
    return a, b, c


def _solve(rows: list[list[float]]) -> list[float]:
    """The unknowns of equations whose right sides are 1."""
    ones = torch.ones(len(rows), dtype=torch.float64)
    solution: torch.Tensor = linalg.solve(  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        torch.tensor(rows, dtype=torch.float64), ones
    )
    return cast("list[float]", solution.tolist())  # pyright: ignore[reportUnknownMemberType]


def band(steps: Sequence[Quintic], lower: float, upper: float = 1.0) -> tuple[float, float]:
    """The band to which the steps map singular values in ``[lower, upper]``: on a fine grid, without rounding."""
    values = torch.logspace(math.log10(lower), math.log10(upper), 20_001, dtype=torch.float64)
    for a, b, c in steps:
        values = values * (a + values**2 * (b + c * values**2))
    return values.min().item(), values.max().item()


def _value(step: Quintic, x: float) -> float:
    a, b, c = step
    return x * (a + x * x * (b + c * x * x))
