"""Checkpoints at URLs, where nothing can be renamed: a save counts once its manifest is there."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_muon.checkpoint import saving
from lightning_muon.checkpoint.loading import Checkpoint
from lightning_muon.checkpoint.manifest import damages
from lightning_muon.checkpoint.newest import first_intact, newest_first
from lightning_muon.checkpoint.staging import discard, last_written
from lightning_muon.checkpoint.urls import UrlPath, place
from lightning_muon.cli.main import main
from lightning_muon.compat.lightning import LightningPackage
from lightning_muon.integrations.lightning.first_callback import save_last
from lightning_muon.integrations.registry import make
from tests.integration import training
from tests.support.processes import ProcessPool


def _fit(url: str, max_steps: int, options: dict[str, Any]) -> list[float]:
    """Losses of a run that goes on from what is at ``url``; the third-last step saves last."""
    pl = training.load()
    resume = make("AutoResume", training.PACKAGES[0])(url, keep=1, every_n_train_steps=2)
    model, strategy = training.language_model(pl), training.strategy_class()(**options)
    kwargs = {"max_steps": max_steps, "max_epochs": -1, "enable_checkpointing": True}
    training.trainer(pl, strategy=strategy, callbacks=[resume], **kwargs).fit(model, training.loader())
    return model.losses


@pytest.mark.parametrize("options", [{"async_save": True}, {"save_distributed_checkpoint": False}])
def test_a_run_goes_on_from_a_url(gloo: ProcessPool, tmp_path: Path, options: dict[str, Any], capsys: Any) -> None:
    # fsspec's name of the local disk that this package treats as it would an object store.
    url, folder = f"local://{tmp_path}/run", tmp_path / "run"
    whole = gloo.run(_fit, str(tmp_path / "unbroken"), 8, options, world_size=2)[0]
    first = gloo.run(_fit, url, 5, options, world_size=2)[0]
    assert first == whole[:5] and [path.name for path in folder.iterdir()] == ["epoch=0-step=4.ckpt"]
    resumed = gloo.run(_fit, url, 8, options, world_size=2)[0]
    assert resumed == whole[4:]
    (checkpoint,) = newest_first(place(url))
    assert str(checkpoint) == f"{url}/epoch=1-step=8.ckpt" and main(["verify", url]) is None
    found = folder / checkpoint.name
    files = [path for path in found.rglob("*") if path.is_file()] if found.is_dir() else [found]
    bad = next(file for file in files if file.name in ("__1_0.distcp", found.name))
    bad.write_bytes(bad.read_bytes()[:-300] + bytes(300))
    with pytest.raises(SystemExit):
        main(["verify", url])
    assert f"{bad.name} " in capsys.readouterr().out


def _save(url: Path, step: int, *, fails: bool = False) -> None:
    problem = mock.patch.object(saving, "write_manifest", side_effect=KeyboardInterrupt)
    with problem if fails else mock.patch.object(saving, "_README_TEXT", ""):
        saving.write_checkpoint(
            url, {"step": torch.tensor(step)}, {"global_step": step, "loops": {}}, metadata_name="meta.pt"
        )


def _step(url: Path) -> int:
    return Checkpoint.open(url, metadata_name="meta.pt", weights_only=True).content["global_step"]


def _killed(*_: Any) -> None:
    raise KeyboardInterrupt


def _replace() -> None:
    folder = place("memory://run")
    url = folder / "last.ckpt"
    assert isinstance(url, UrlPath) and str(url) == "memory://run/last.ckpt" and place(Path(str(url))) == url
    _save(url, 1)
    with warnings.catch_warnings(), pytest.raises(KeyboardInterrupt), mock.patch.object(UrlPath, "remove"):
        _save(url, 2, fails=True)  # Killed: nothing is cleared away.
    assert len(list(url.iterdir())) == 2 and _step(url) == 1
    _save(url, 3)
    assert len(list(url.iterdir())) == 1 and _step(url) == 3 and newest_first(folder) == [url]
    with pytest.raises(KeyboardInterrupt), mock.patch.object(UrlPath, "remove"):
        _save(folder / "first.ckpt", 4, fails=True)
    (line,) = damages(last_written(folder / "first.ckpt")) or [""]
    assert "memory://run/first.ckpt has neither manifest.json nor .metadata: it was not written to its end" in line
    with pytest.warns(UserWarning, match=r"first\.ckpt has neither manifest"):
        assert first_intact([folder / "first.ckpt", url]) == last_written(url)
    with pytest.raises(FileExistsError, match=r"last\.ckpt is a directory"):
        saving.write_checkpoint(url, {}, {}, metadata_name=None)
    discard(url)
    assert not url.exists()
    # A single file, of which a killed process has written some.
    file = folder / "whole.ckpt"
    with pytest.raises(KeyboardInterrupt), mock.patch.multiple(UrlPath, remove=mock.DEFAULT, rename=_killed):
        saving.write_checkpoint(file, {}, {"step": 1}, metadata_name=None)
    assert not file.exists()
    saving.write_checkpoint(file, {}, {"step": 2}, metadata_name=None)
    assert sorted(path.name for path in folder.iterdir()) == ["first.ckpt", "whole.ckpt"]


def test_a_save_without_manifest_does_not_count(gloo: ProcessPool) -> None:
    gloo.run(_replace, world_size=1)


def test_the_last_checkpoint_has_a_name_at_a_url() -> None:
    pl, saved = training.load(), list[str]()
    folder = place("memory://signals")
    trainer: Any = SimpleNamespace(
        state=SimpleNamespace(fn="fit"), sanity_checking=False, fast_dev_run=False, ckpt_path=None, is_global_zero=True
    )
    trainer.checkpoint_callbacks = [pl.callbacks.ModelCheckpoint(dirpath=str(folder))]
    trainer.strategy, trainer.save_checkpoint = SimpleNamespace(broadcast=lambda path: path), saved.append
    package = LightningPackage(training.PACKAGES[0])
    save_last(trainer, package)
    folder.mkdir()
    (folder / "last.ckpt").open("w").close()
    save_last(trainer, package)  # That of another run stays.
    trainer.ckpt_path = f"{folder}/last.ckpt"
    save_last(trainer, package)
    assert saved == [f"{folder}/{name}" for name in ("last.ckpt", "last-v1.ckpt", "last.ckpt")]


def test_a_file_url_is_a_path() -> None:
    assert place("file:///tmp/run") == place(Path("file:///tmp/run")) == Path("/tmp/run")
    assert type(place("relative/run")) is type(Path())
