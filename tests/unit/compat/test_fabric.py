"""Fails when a private name of Fabric moves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import nn

from lightning_muon.compat.fabric import set_no_backward_sync
from lightning_muon.integrations.registry import FABRICS as PACKAGES


@pytest.mark.parametrize("package", PACKAGES)
def test_no_backward_sync_enters_what_was_set(package: str) -> None:
    fabric_package = pytest.importorskip(package)
    strategies = pytest.importorskip(f"{package}.strategies")
    entered: list[Any] = []

    @contextmanager
    def no_sync(module: nn.Module) -> Iterator[None]:
        entered.append(module)
        yield

    strategy = strategies.ModelParallelStrategy(lambda module, mesh: module)
    assert hasattr(strategy, "_backward_sync_control")
    set_no_backward_sync(strategy, no_sync)
    fabric = fabric_package.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    inner = nn.Linear(2, 2)
    model = pytest.importorskip(f"{package}.wrappers")._FabricModule(inner, strategy)
    with fabric.no_backward_sync(model, enabled=False):
        assert entered == []
    with fabric.no_backward_sync(model):
        assert entered == [inner]
