"""The options of DiLoCo."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_muon.flexdemo.replicators import DiLoCo


def test_defaults_are_those_of_the_paper() -> None:
    options = DiLoCo(period=500)
    assert (options.outer_lr, options.outer_momentum, options.nesterov, options.overlap) == (0.7, 0.9, True, False)
    assert options.bits_per_parameter() == 32 / 500


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"period": 0}, ValueError, "period must be at least 1, got 0"),
        ({"period": 2.5}, TypeError, "period must be an int, got 2.5"),
        ({"period": True}, TypeError, "period must be an int"),
        ({"period": 5, "outer_lr": 0.0}, ValueError, "outer_lr must be positive"),
        ({"period": 5, "outer_lr": float("nan")}, ValueError, "outer_lr must be positive"),
        ({"period": 5, "outer_momentum": 1.0}, ValueError, r"outer_momentum must be in \[0, 1\)"),
        ({"period": 5, "outer_momentum": -0.1}, ValueError, r"outer_momentum must be in \[0, 1\)"),
    ],
)
def test_wrong_options_are_errors(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DiLoCo(**options)
