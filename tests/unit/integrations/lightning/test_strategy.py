"""Arguments and identity of the strategy; whole runs are in tests/integration."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest

from lightning_muon import MuonConfig, Options
from tests.integration.training import PACKAGES, strategy_class


@pytest.fixture(params=PACKAGES)
def cls(request: pytest.FixtureRequest) -> Any:
    pytest.importorskip(request.param)
    return strategy_class(request.param)


def test_the_arguments_are_the_options_and_those_of_model_parallel_strategy(cls: Any) -> None:
    base = cls.__mro__[-1 - [c.__name__ for c in reversed(cls.__mro__)].index("ModelParallelStrategy")]
    arguments = inspect.signature(cls).parameters.keys()
    assert inspect.signature(base).parameters.keys() <= arguments == {field.name for field in fields(Options)}
    given: Any = {"data_parallel_size": 2, "optimizer": MuonConfig(lr=0.5), "save_distributed_checkpoint": False}
    assert cls(**given).options == Options(**given) and not cls(**given)._save_distributed_checkpoint
