"""The package of the integration resolves the strategy lazily."""

from __future__ import annotations

import pytest

import lightning_muon
from lightning_muon.integrations import lightning as room


def test_the_strategy_of_lightning_pytorch_comes_first() -> None:
    pytest.importorskip("lightning.pytorch")
    from lightning_muon.integrations.lightning.lightning_pytorch import ParallelMuonStrategy

    assert room.ParallelMuonStrategy is ParallelMuonStrategy
    assert lightning_muon.ParallelMuonStrategy is ParallelMuonStrategy


def test_other_names_are_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Strategy'"):
        room.Strategy  # noqa: B018
