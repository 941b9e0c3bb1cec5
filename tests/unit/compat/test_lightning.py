"""Fails when a private name of Lightning moves."""

from typing import Any

import pytest

from lightning_muon.compat.lightning import (
    LightningPackage,
)
from tests.integration.training import PACKAGES

pytestmark = pytest.mark.parametrize("name", PACKAGES)


@pytest.fixture
def package(name: Any) -> LightningPackage:
    pytest.importorskip(name)
    return LightningPackage(name)


def test_names_that_are_assigned_exist(package: LightningPackage) -> None:
    strategy = package.module("strategies").ModelParallelStrategy()
    assert callable(strategy._setup_distributed)
    assert strategy._device_mesh is None and strategy._layer_sync is None
    assert package.module().LightningModule()._device_mesh is None
    assert hasattr(package.fabric("strategies").FSDPStrategy(accelerator=None), "_backward_sync_control")
