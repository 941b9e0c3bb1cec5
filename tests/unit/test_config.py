"""Ranges of the options."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lightning_muon.config import MuonConfig, check_hyperparameters


def test_the_defaults_are_valid_and_frozen() -> None:
    config = MuonConfig()
    check_hyperparameters(vars(config))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("option", "value"),
    [("lr", -1e-3), ("lr", float("inf")), ("momentum", 1.0), ("eps", -1.0), ("betas", (0.9,)), ("ns_steps", 100),
     ("ns_steps", 2.5), ("adjust_lr_fn", "adamw"), ("ns_coefficients", (1, 2)), ("chunk_bytes", 0)],
)  # fmt: skip
def test_a_value_out_of_range_is_named(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=option):
        MuonConfig(**{option: value})
