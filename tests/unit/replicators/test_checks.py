"""Checks of options."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lightning_muon.replicators.checks import period, require_count, require_rate


@pytest.mark.parametrize(("rate", "expected"), [(1.0, 1), (0.9, 1), (0.5, 2), (0.3, 3), (1 / 128, 128)])
def test_the_period_is_the_inverse_of_the_rate(rate: float, expected: int) -> None:
    assert period(rate) == expected


def test_errors_name_the_class_the_option_and_the_value() -> None:
    with pytest.raises(ValueError, match="SimpleNamespace: size must be at least 1, got 0"):
        require_count(SimpleNamespace(size=0), "size")
    with pytest.raises(TypeError, match="SimpleNamespace: size must be an int, got '3'"):
        require_count(SimpleNamespace(size="3"), "size")
    with pytest.raises(TypeError, match=r"rate must be a number, got '0\.5'"):
        require_rate(SimpleNamespace(rate="0.5"))
    require_count(SimpleNamespace(size=1), "size")
    require_rate(SimpleNamespace(rate=1))
