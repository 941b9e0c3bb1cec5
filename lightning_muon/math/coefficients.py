"""Coefficients ``(a, b, c)`` of each Newton-Schulz step ``x <- a x + b x^3 + c x^5``."""

from __future__ import annotations

from functools import cache

from lightning_muon.config import NsCoefficients, Quintic

JORDAN: Quintic = (3.4445, -4.7750, 2.0315)  # https://kellerjordan.github.io/posts/muon
# Polar Express for bfloat16 (Amsel et al. 2025, arXiv:2505.16932, Algorithm 1 with the changes of section 3.4), in
# which each step is the best for what the steps before it leave of the singular values in [0.001, 1]. From the tenth
# step on these lie so near 1 that the step stays the same. Computed by
# tests/reference/polar_express.py, and compared with the published ones in tests/unit/math/test_coefficients.py.
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
