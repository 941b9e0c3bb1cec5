"""Coefficients: published values, how they are computed, and where they take singular values."""

import pytest
import torch

from lightning_muon.math.newton_schulz import FAST, POLAR_EXPRESS, steps_of
from tests.reference.polar_express import polar_express

# From the listing in arXiv:2505.16932, before the division by powers of 1.01.
_PUBLISHED = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
]
# Steps -> where the singular values from 0.01 to 1 end without rounding.
_BANDS = {
    "jordan": (steps_of("jordan", 5), (0.68, 1.14)),
    "polar_express": (steps_of("polar_express", 5), (0.86, 1.13)),
    "fast": (FAST, (0.70, 1.28)),
}


def test_polar_express_is_the_published_one_and_computed() -> None:
    found = [(1.01 * a, 1.01**3 * b, 1.01**5 * c) for a, b, c in POLAR_EXPRESS[:7]]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(_PUBLISHED), rtol=1e-6, atol=0)
    # LAPACK may round in another way elsewhere.
    for steps, least in ((POLAR_EXPRESS, 1e-3), (FAST, 0.01)):
        computed = polar_express(len(steps), least)
        torch.testing.assert_close(torch.tensor(steps).double(), torch.tensor(computed).double(), rtol=1e-9, atol=0)
    # What is left is so near 1 that the step is the Pade approximation.
    assert steps_of("polar_express", 12) == POLAR_EXPRESS + ((1.875, -1.25, 0.375),) * 2
    assert steps_of("polar_express", 3) == POLAR_EXPRESS[:3]


@pytest.mark.parametrize("preset", _BANDS)
def test_singular_values_end_in_the_band_of_a_preset(preset: str) -> None:
    steps, (low, high) = _BANDS[preset]
    grid = torch.logspace(-2, 0, 20_001, dtype=torch.float64)
    for a, b, c in steps:
        grid = grid * (a + grid**2 * (b + c * grid**2))
    assert low <= grid.min() and grid.max() <= high


def test_one_triple_or_one_for_each_step() -> None:
    assert steps_of((2.0, -1.5, 0.5), 3) == ((2.0, -1.5, 0.5),) * 3
    assert steps_of(((2.0, -1.5, 0.5), (1.0, 0.0, 0.0)), 2) == ((2.0, -1.5, 0.5), (1.0, 0.0, 0.0))
