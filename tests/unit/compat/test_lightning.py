"""Fails when a private name of Lightning moves."""

from __future__ import annotations

import importlib
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
    start_process_group,
)
from tests.integration.training import PACKAGES

pytestmark = pytest.mark.parametrize("name", PACKAGES)


def _package(name: Any) -> LightningPackage:
    pytest.importorskip(name)
    return LightningPackage(name)


def test_modules_come_from_the_named_package(name: Any) -> None:
    package = _package(name)
    assert package.module().__name__ == name
    assert package.module("callbacks").__name__ == f"{name}.callbacks"
    assert package.fabric("utilities.load").__name__.endswith("utilities.load")


def test_model_parallel_strategy_has_the_names_that_we_use(name: Any) -> None:
    strategy = _package(name).module("strategies").ModelParallelStrategy()
    assert callable(strategy._setup_distributed)
    assert strategy._device_mesh is None
    assert strategy._layer_sync is None
    assert "_setup_distributed" in inspect.getsource(start_process_group)


def test_the_mesh_reaches_strategy_and_module(name: Any) -> None:
    package = _package(name)
    strategy = package.module("strategies").ModelParallelStrategy()
    strategy._lightning_module = package.module().LightningModule()
    mesh: Any = object()
    set_device_mesh(strategy, mesh)
    assert strategy.device_mesh is mesh
    assert strategy.lightning_module.device_mesh is mesh


def test_sync_batchnorm_is_applied(name: Any) -> None:
    package = _package(name)
    strategy = package.module("strategies").ModelParallelStrategy()
    module = nn.Sequential(nn.BatchNorm1d(3))
    apply_layer_sync(strategy, module)
    assert type(module[0]) is nn.BatchNorm1d
    strategy._layer_sync = package.module("plugins.layer_sync").TorchSyncBatchNorm()
    apply_layer_sync(strategy, module)
    assert type(module[0]) is nn.SyncBatchNorm


def test_the_metadata_file_is_the_one_that_lightning_writes(name: Any) -> None:
    package = _package(name)
    source = inspect.getsource(importlib.import_module(f"{name}.strategies.model_parallel"))
    assert "path / _METADATA_FILENAME" in source
    assert metadata_filename(package) == "meta.pt"


def test_the_stand_in_optimizer_is_recognized(name: Any) -> None:
    package = _package(name)
    optimizers, *_ = _configure_nothing(package)
    assert is_placeholder_optimizer(package, optimizers[0])
    assert not is_placeholder_optimizer(package, torch.optim.SGD([torch.zeros(1)], lr=1.0))


def _configure_nothing(package: LightningPackage) -> Any:
    core = package.module("core.optimizer")
    return core._configure_optimizers(core._MockOptimizer())


def test_no_backward_sync_enters_what_was_set(name: Any) -> None:
    package = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}[name]
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
