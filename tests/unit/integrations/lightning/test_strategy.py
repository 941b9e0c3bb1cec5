"""Arguments and identity of the strategy; whole runs are in tests/integration."""

from __future__ import annotations

import inspect
from dataclasses import fields
from datetime import timedelta
from typing import Any, get_type_hints

import pytest

from lightning_muon import MuonConfig, Options
from lightning_muon.integrations import strategy as shared
from tests.integration.training import PACKAGES, strategy_class


@pytest.fixture(params=PACKAGES)
def cls(request: pytest.FixtureRequest) -> Any:
    pytest.importorskip(request.param)
    return strategy_class(request.param)


def test_the_arguments_of_model_parallel_strategy_are_taken(cls: Any) -> None:
    base = cls.__mro__[-1 - [c.__name__ for c in reversed(cls.__mro__)].index("ModelParallelStrategy")]
    theirs = set(inspect.signature(base.__init__).parameters)
    assert theirs <= set(inspect.signature(cls.__init__).parameters)
    strategy = cls(
        data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False, optimizer=MuonConfig()
    )
    assert not strategy._save_distributed_checkpoint


def test_the_arguments_are_the_options(cls: Any) -> None:
    arguments = list(inspect.signature(cls).parameters.values())
    assert {a.name: a.default for a in arguments} == {f.name: f.default for f in fields(Options)}
    assert get_type_hints(cls.__init__, vars(shared))["optimizer"] == get_type_hints(Options)["optimizer"]
    given = {"replicate_size": 2, "optimizer": MuonConfig(lr=0.5), "timeout": timedelta(1)}
    assert cls(**given).options == Options(**given)
    assert all(f"\n    {a.name}: " in inspect.cleandoc(cls.__doc__) for a in arguments)
