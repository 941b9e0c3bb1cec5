"""Callbacks and the default optimizer of a Trainer; whole runs are in tests/integration/test_callbacks.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_muon import FlexDeMo, FlexDeMoConfig, MuonConfig, Options, ParallelMuon
from lightning_muon.compat.lightning import LightningPackage
from lightning_muon.integrations.lightning.trainer import (
    has_default_optimizer,
    provide_default_optimizer,
    reads_gradients,
    reads_weights_between_steps,
    refuse_callbacks,
    remove_default_optimizer,
    wait_before_callbacks,
)
from tests.integration.training import PACKAGES


@pytest.mark.parametrize("name", PACKAGES)
def test_subclasses_are_refused_and_others_pass(name: Any) -> None:
    callbacks = pytest.importorskip(f"{name}.callbacks")
    package = LightningPackage(name)

    class Own(callbacks.StochasticWeightAveraging):
        pass

    with pytest.raises(
        ValueError, match=r"Own does not work with ParallelMuonStrategy.*average their 'state_dict' entries"
    ):
        refuse_callbacks([callbacks.Timer(), Own(1e-3)], package)
    refuse_callbacks([callbacks.Timer(), callbacks.EarlyStopping("loss"), callbacks.ModelCheckpoint()], package)


@pytest.mark.parametrize("name", PACKAGES)
def test_the_names_of_the_refused_callbacks_exist(name: Any) -> None:
    from lightning_muon.integrations.lightning.trainer import _REFUSED

    callbacks = pytest.importorskip(f"{name}.callbacks")
    assert all(isinstance(getattr(callbacks, refused), type) for refused in _REFUSED)


class _Trainer:
    """What the checks look at."""

    def __init__(self, module: Any, callbacks: list[Any]) -> None:
        self.lightning_module, self.callbacks = module, callbacks


@pytest.mark.parametrize("name", PACKAGES)
def test_code_of_the_user_between_steps_is_found(name: Any) -> None:
    pl = pytest.importorskip(name)
    package = LightningPackage(name)

    class Plain(pl.LightningModule):
        def on_train_epoch_end(self) -> None:
            """Not between two steps."""

    class Hooked(pl.LightningModule):
        def on_train_batch_end(self, *_: Any) -> None:
            """Here weights may be read."""

    class Stepping(pl.LightningModule):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            """And here."""

    class Own(pl.Callback):
        def on_before_zero_grad(self, *_: Any) -> None:
            """And here."""

    quiet = [pl.callbacks.ModelCheckpoint(), pl.callbacks.LearningRateMonitor(), pl.callbacks.ModelSummary()]
    reads = lambda module, callbacks: reads_weights_between_steps(_Trainer(module, callbacks), Options(), package)  # noqa: E731
    assert not reads(Plain(), [*quiet, pl.Callback(), pl.callbacks.LambdaCallback(on_train_epoch_end=print)])
    assert reads(Hooked(), quiet) and reads(Stepping(), quiet) and reads(Plain(), [*quiet, Own()])
    assert reads(Plain(), [pl.callbacks.EMAWeightAveraging()]), "it averages in a hook between steps"
    assert reads(Plain(), [pl.callbacks.LambdaCallback(on_train_batch_end=print)])


@pytest.mark.parametrize("name", PACKAGES)
def test_hooks_that_look_for_gradients_are_named(name: Any) -> None:
    pl = pytest.importorskip(name)

    class Hooked(pl.LightningModule):
        def on_after_backward(self) -> None:
            """Gradients are read here."""

    class Own(pl.Callback):
        def on_before_optimizer_step(self, *_: Any) -> None:
            """And here."""

    trainer = _Trainer(Hooked(), [pl.callbacks.ModelCheckpoint(), Own()])
    assert reads_gradients(trainer, LightningPackage(name)) == [
        "Hooked.on_after_backward",
        "Own.on_before_optimizer_step",
    ]
    from_lambda = pl.callbacks.LambdaCallback(on_before_optimizer_step=print)
    assert reads_gradients(_Trainer(pl.LightningModule(), [from_lambda]), LightningPackage(name)) == [
        "LambdaCallback.on_before_optimizer_step"
    ]
    assert reads_gradients(_Trainer(pl.LightningModule(), []), LightningPackage(name)) == []


@pytest.mark.parametrize("name", PACKAGES)
def test_the_first_callback_waits_at_the_ends(name: Any) -> None:
    pl = pytest.importorskip(name)
    calls: list[int] = []
    trainer = _Trainer(pl.LightningModule(), [])
    callback = wait_before_callbacks(trainer, LightningPackage(name), lambda: calls.append(1), pytest.fail)
    assert isinstance(callback, pl.Callback) and trainer.callbacks == [callback]
    callback.on_train_epoch_end(None, None)
    callback.on_validation_start(None, None)
    callback.on_train_batch_end(None, None, None, None, 0)
    assert len(calls) == 2


_PACKAGE = LightningPackage("lightning.pytorch")


class _WithoutOptimizer(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first, self.last = nn.Embedding(5, 4), nn.Linear(4, 6), nn.Linear(6, 5)


class _WithOptimizer(_WithoutOptimizer):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def test_a_module_without_optimizer_gets_one_and_loses_it_again() -> None:
    module = _WithoutOptimizer()
    provide_default_optimizer(module, MuonConfig(lr=0.25), _PACKAGE)
    optimizer = module.configure_optimizers()
    assert isinstance(optimizer, ParallelMuon)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert has_default_optimizer(module)
    remove_default_optimizer(module)
    assert "configure_optimizers" not in vars(module) and not has_default_optimizer(module)


def test_the_optimizer_of_the_user_is_not_replaced_by_the_default() -> None:
    module = _WithOptimizer()
    provide_default_optimizer(module, MuonConfig(), _PACKAGE)
    assert isinstance(module.configure_optimizers(), torch.optim.AdamW)
    remove_default_optimizer(module)


def test_the_config_decides_what_a_module_without_optimizer_gets() -> None:
    module = _WithoutOptimizer()
    provide_default_optimizer(module, FlexDeMoConfig(lr=0.25, base="muon"), _PACKAGE)
    optimizer = module.configure_optimizers()
    assert isinstance(optimizer, FlexDeMo) and optimizer.config.lr == 0.25
    remove_default_optimizer(module)
