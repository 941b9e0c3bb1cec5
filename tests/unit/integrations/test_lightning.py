"""Callbacks of a Trainer; whole runs are in tests/integration."""

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_muon import Options
from lightning_muon.compat.lightning import LightningPackage
from lightning_muon.integrations.lightning import trainer as room
from tests.integration.training import PACKAGES


@pytest.fixture(params=PACKAGES)
def pl(request: pytest.FixtureRequest) -> Any:
    return pytest.importorskip(request.param)


def _package(pl: Any) -> LightningPackage:
    return LightningPackage(pl.__name__)


def _module(pl: Any, hook: str = "on_train_epoch_end") -> Any:
    """A module that overrides a hook."""
    return type("Module", (pl.LightningModule,), {hook: lambda self, *args: None})()


def _trainer(module: Any, *callbacks: Any) -> Any:
    """What the checks look at."""
    options = SimpleNamespace(options=Options(sharding="zero2"))
    return SimpleNamespace(
        lightning_module=module,
        callbacks=list(callbacks),
        strategy=options,
        checkpoint_callbacks=[each for each in callbacks if hasattr(each, "best_model_path")],
    )


def test_async_save_refuses_links_and_other_writers(pl: Any) -> None:
    kind = _package(pl).fabric("plugins").TorchCheckpointIO
    for save_last, plugin, match in (("link", kind, "save_last='link'"), (True, type("Own", (kind,), {}), "with Own")):
        trainer = _trainer(None, pl.callbacks.ModelCheckpoint(save_last=save_last))
        trainer.strategy.checkpoint_io = plugin()
        module = SimpleNamespace(trainer=trainer, automatic_optimization=True)
        room.check_run(module, Options(), _package(pl))
        with pytest.raises(ValueError, match=match):
            room.check_run(module, Options(async_save=True), _package(pl))


def test_two_callbacks_that_write_one_file_are_refused(pl: Any) -> None:
    def check(*options: dict[str, Any]) -> None:
        callbacks = [pl.callbacks.ModelCheckpoint(**{"dirpath": "runs"} | each) for each in options]
        room.require_own_files(_trainer(None, *callbacks), _package(pl))

    check({}, {"filename": "{epoch}-{val_loss:.2f}"}, {"dirpath": "others", "save_last": True})
    check({"save_top_k": 0, "save_last": True}, {})
    for other in ({}, {"monitor": "loss"}, {"filename": "best", "save_last": True}):
        with pytest.raises(ValueError, match=r"both write such files as .*runs/(last|epoch=0-step=0)\.ckpt"):
            check({"save_last": True}, other)


def test_code_of_the_user_between_steps_is_found(pl: Any) -> None:
    class Own(pl.Callback):
        def on_before_zero_grad(self, *_: Any) -> None:
            """Weights may be read here."""

    def reads(module: Any, *callbacks: Any) -> bool:
        return room.reads_weights_between_steps(_trainer(module, *callbacks), Options(), _package(pl))

    known = pl.callbacks
    quiet = [known.ModelCheckpoint(), known.LearningRateMonitor(), known.ModelSummary()]
    assert not reads(_module(pl), *quiet, pl.Callback(), known.LambdaCallback(on_train_epoch_end=print))
    for hook in ("on_train_batch_end", "optimizer_step"):
        assert reads(_module(pl, hook), *quiet)
    for callback in (Own(), known.EMAWeightAveraging(), known.LambdaCallback(on_train_batch_end=print)):
        assert reads(_module(pl), *quiet, callback)
