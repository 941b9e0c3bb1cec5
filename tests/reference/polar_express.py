"""The coefficients of Polar Express, computed."""

from __future__ import annotations

import math

import torch

from lightning_muon.config import Quintic


def polar_express(num_steps: int, least: float) -> list[Quintic]:
    """Steps each of which is the best for what the steps before it have left of the singular values in [least, 1].

    The first seven are scaled so that values up to 1.01 stay in the interval, since rounding to bfloat16 carries values
    above it. Source: Amsel et al. 2025, arXiv:2505.16932, Algorithm 1, section 3.4 and its listing.
    """
    steps: list[Quintic] = []
    lower, upper, cushion = least, 1.0, 0.02407327424182761  # Least quotient of an interval's ends.
    for index in range(num_steps):
        a, b, c = best_quintic(max(lower, cushion * upper), upper)
        if lower < cushion * upper:  # Centered around 1 on the whole interval again.
            scale = 2 / (value_of((a, b, c), lower) + value_of((a, b, c), upper))
            a, b, c = scale * a, scale * b, scale * c
        lower = value_of((a, b, c), lower)
        upper = 2 - lower
        safety = 1.01 if index < 7 else 1.0
        steps.append((a / safety, b / safety**3, c / safety**5))
    return steps


def best_quintic(lower: float, upper: float) -> Quintic:
    """The odd polynomial of degree 5 that is nearest to 1 on an interval, by the Remez algorithm.

    It errs by as much, and in turn, at four points: both ends and its two extrema between them.
    """
    if lower > (1 - 5e-6) * upper:  # The limit, a Pade approximation; the equations below are singular.
        return 15 / 8 / upper, -10 / 8 / upper**3, 3 / 8 / upper**5
    inner = [(3 * lower + upper) / 4, (lower + 3 * upper) / 4]
    a, b, c, error, last = 0.0, 0.0, 0.0, 1.0, math.inf
    while abs(last - error) > 1e-15:
        last = error
        rows = [[x, x**3, x**5, (-1.0) ** index] for index, x in enumerate([lower, *inner, upper])]
        equations, ones = torch.tensor(rows, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
        a, b, c, error = torch.linalg.solve(equations, ones).tolist()
        root = math.sqrt(9 * b * b - 20 * a * c)
        inner = [math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))]
    return a, b, c


def value_of(step: Quintic, x: float) -> float:
    a, b, c = step
    return x * (a + x * x * (b + c * x * x))
