"""Fails when a private name of Lightning moves."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from lightning_muon.compat.lightning import (
    LightningPackage,
    apply_layer_sync,
    is_placeholder_optimizer,
    metadata_filename,
    set_device_mesh,
    set_no_backward_sync,
)
from tests.integration.training import PACKAGES

pytestmark = pytest.mark.parametrize("name", PACKAGES)


@pytest.fixture
def package(name: Any) -> LightningPackage:
    pytest.importorskip(name)
    return LightningPackage(name)


def test_the_mesh_reaches_strategy_and_module(package: LightningPackage) -> None:
    strategy = package.module("strategies").ModelParallelStrategy()
    strategy._lightning_module = package.module().LightningModule()
    mesh: Any = object()
    assert callable(strategy._setup_distributed) and strategy._device_mesh is None
    set_device_mesh(strategy, mesh)
    assert strategy.device_mesh is mesh
    assert strategy.lightning_module.device_mesh is mesh


def test_sync_batchnorm_is_applied(package: LightningPackage) -> None:
    strategy = package.module("strategies").ModelParallelStrategy()
    module = nn.Sequential(nn.BatchNorm1d(3))
    apply_layer_sync(strategy, module)
    assert type(module[0]) is nn.BatchNorm1d
    strategy._layer_sync = package.module("plugins.layer_sync").TorchSyncBatchNorm()
    apply_layer_sync(strategy, module)
    assert type(module[0]) is nn.SyncBatchNorm


def test_the_metadata_file_is_the_one_that_lightning_writes(package: LightningPackage) -> None:
    source = inspect.getsource(package.module("strategies.model_parallel"))
    assert "path / _METADATA_FILENAME" in source
    assert metadata_filename(package) == "meta.pt"


def test_the_stand_in_optimizer_is_recognized(package: LightningPackage) -> None:
    core = package.module("core.optimizer")
    optimizers, *_ = core._configure_optimizers(core._MockOptimizer())
    assert is_placeholder_optimizer(package, optimizers[0])
    assert not is_placeholder_optimizer(package, torch.optim.SGD([torch.zeros(1)], lr=1.0))


def test_no_backward_sync_enters_what_was_set(package: LightningPackage) -> None:
    entered: list[Any] = []

    @contextmanager
    def no_sync(module: nn.Module) -> Iterator[None]:
        entered.append(module)
        yield

    strategy = package.fabric("strategies").ModelParallelStrategy(lambda module, mesh: module)
    assert hasattr(strategy, "_backward_sync_control")
    set_no_backward_sync(strategy, no_sync)
    fabric = package.fabric("fabric").Fabric(accelerator="cpu", devices=2, strategy=strategy)
    inner = nn.Linear(2, 2)
    model = package.fabric("wrappers")._FabricModule(inner, strategy)
    with fabric.no_backward_sync(model, enabled=False):
        assert entered == []
    with fabric.no_backward_sync(model):
        assert entered == [inner]
