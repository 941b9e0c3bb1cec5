"""Fails when a private name of Lightning moves."""

import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_muon.compat.lightning import (
    LightningPackage,
    apply_layer_sync,
    forget_logged,
    is_placeholder_optimizer,
    set_sampler_epoch,
    signal_handlers,
)
from tests.integration.training import PACKAGES

pytestmark = pytest.mark.parametrize("name", PACKAGES)


@pytest.fixture
def package(name: Any) -> LightningPackage:
    pytest.importorskip(name)
    return LightningPackage(name)


def test_sync_batchnorm_is_applied(package: LightningPackage) -> None:
    strategy = package.module("strategies").ModelParallelStrategy()
    module = nn.Sequential(nn.BatchNorm1d(3))
    apply_layer_sync(strategy, module)
    assert type(module[0]) is nn.BatchNorm1d
    strategy._layer_sync = package.module("plugins.layer_sync").TorchSyncBatchNorm()
    apply_layer_sync(strategy, module)
    assert type(module[0]) is nn.SyncBatchNorm


def test_the_stand_in_optimizer_is_recognized(package: LightningPackage) -> None:
    core = package.module("core.optimizer")
    optimizers, *_ = core._configure_optimizers(core._MockOptimizer())
    assert is_placeholder_optimizer(package, optimizers[0])
    assert not is_placeholder_optimizer(package, torch.optim.SGD([torch.zeros(1)], lr=1.0))


def test_names_that_are_assigned_exist(package: LightningPackage) -> None:
    strategy = package.module("strategies").ModelParallelStrategy()
    assert callable(strategy._setup_distributed)
    assert strategy._device_mesh is None and strategy._layer_sync is None
    assert package.module().LightningModule()._device_mesh is None
    assert hasattr(package.fabric("strategies").FSDPStrategy(accelerator=None), "_backward_sync_control")


def test_handlers_of_signals_are_found(package: LightningPackage) -> None:
    connector = package.module().Trainer(accelerator="cpu", logger=False)._signal_connector
    assert signal_handlers(package) == {}
    connector.register_signal_handlers()
    assert list(signal_handlers(package)) == [signal.SIGTERM]
    connector.teardown()


def test_a_sampler_is_told_its_epoch(package: LightningPackage) -> None:
    sampler = DistributedSampler([0, 1], num_replicas=1, rank=0)  # pyright: ignore[reportArgumentType]
    set_sampler_epoch(package, DataLoader([0, 1], sampler=sampler), 3)  # pyright: ignore[reportArgumentType]
    assert sampler.epoch == 3


def test_results_that_were_logged_are_forgotten(package: LightningPackage) -> None:
    loop = package.module("trainer.connectors.logger_connector.result")
    results = loop._ResultCollection(training=True)
    for name in ("a", "b"):
        results.log("training_step", name, torch.tensor(2.0), on_step=True, on_epoch=False)
    assert hasattr(package.module().Trainer, "_results")
    forget_logged(SimpleNamespace(_results=results), ["a"])
    assert results.metrics(on_step=True)["log"].keys() == {"b"}
    results.log("training_step", "a", torch.tensor(3.0), on_step=True, on_epoch=False)
    assert float(results.metrics(on_step=True)["log"]["a"]) == 3
