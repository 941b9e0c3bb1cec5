"""What the package of the integration exports."""

from __future__ import annotations

import pytest

from lightning_muon.integrations import fabric
from lightning_muon.integrations.fabric.registry import strategy_class


def test_the_strategy_is_that_of_the_first_package() -> None:
    pytest.importorskip("lightning.fabric")
    assert fabric.ParallelMuonFabricStrategy is strategy_class("lightning.fabric")


def test_other_names_do_not_exist() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = fabric.Nothing  # type: ignore[attr-defined]
