"""``async_save=True``: the state at the call is written while the training goes on, and counts when it is complete."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from lightning_muon.checkpoint.loading import newest_first
from lightning_muon.checkpoint.manifest import damages
from lightning_muon.checkpoint.saving import THREAD
from lightning_muon.compat.torch import load_whole
from lightning_muon.integrations.registry import make
from tests.integration import training
from tests.integration.checkpoint.test_staging import _names
from tests.support.processes import ProcessPool, RanksFailedError


def _gate() -> threading.Event:
    """Lets the thread of a save wait before it opens the first file, until a training sets the event."""
    is_open = threading.Event()

    def wait(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and "w" in str(arguments[1]) and threading.current_thread().name == THREAD:
            assert is_open.wait(20), "the training did not go on"

    sys.addaudithook(wait)
    return is_open


def _fit(directory: str, is_async: bool, whole: bool) -> Any:
    """Save in the middle of an epoch; the training takes two steps, and begins an epoch, before the commit."""
    pl, gate = training.load(), _gate()
    strategy = training.strategy_class()(async_save=is_async, save_distributed_checkpoint=not whole)
    seen: list[Any] = []

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            torch.rand(1)
            path = Path(directory) / "saved.ckpt"
            if trainer.global_step == 3:
                (Path(directory) / "old.ckpt").mkdir(exist_ok=True)
                trainer.save_checkpoint(path)
                strategy.remove_checkpoint(Path(directory) / "old.ckpt")
            if trainer.global_step == 6:
                seen.append([name for name in _names(Path(directory)) if not name.startswith(".")])
                gate.set()

    pl.seed_everything(0, verbose=False)
    model = training.language_model(pl)
    loader = torch.utils.data.DataLoader(
        training.dataset(), batch_size=4, num_workers=1, multiprocessing_context="fork"
    )
    training.trainer(pl, strategy=strategy, callbacks=[Saves()], max_epochs=2).fit(model, loader)
    return seen, model.losses


def _content(path: Path) -> dict[str, Any]:
    """All leaves by their keys."""
    if path.is_file():
        found = torch.load(path, weights_only=False)
    else:
        found = load_whole(path) | torch.load(path / "meta.pt", weights_only=False)
    return {keystr(key): leaf for key, leaf in tree_flatten_with_path(found)[0]}


@pytest.mark.parametrize("whole", [False, True], ids=["shards", "file"])
def test_the_state_at_the_call_is_saved_while_steps_go_on(gloo: ProcessPool, tmp_path: Path, whole: bool) -> None:
    found: dict[bool, dict[str, Any]] = {}
    losses: dict[bool, Any] = {}
    for is_async in (False, True):
        directory = tmp_path / str(is_async)
        directory.mkdir()
        (seen, losses[is_async]), _ = gloo.run(_fit, str(directory), is_async, whole, world_size=2)
        # Nothing took its place, and nothing was removed, before the rest of the epoch and a step of the next one.
        assert seen == [["old.ckpt"] if is_async else ["saved.ckpt"]]
        assert _names(directory) == ["saved.ckpt"] and damages(directory / "saved.ckpt") == []
        found[is_async] = _content(directory / "saved.ckpt")
    assert losses[True] == losses[False]
    assert found[True].keys() == found[False].keys() and found[True]["['global_step']"] == 3
    for name, value in found[False].items():
        same = torch.equal(value, found[True][name]) if isinstance(value, Tensor) else value == found[True][name]
        assert same, name


def _fail(directory: str, max_steps: int) -> None:
    """The disk of rank 1 is full when the second checkpoint is written."""
    pl, before, steps = training.load(), resource.getrlimit(resource.RLIMIT_FSIZE), list[int]()

    class Fills(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            steps.append(trainer.global_step)
            if trainer.global_step == 3:
                trainer.strategy.finish_saving()
            if trainer.global_step == 3 and trainer.global_rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))

    resume = make("AutoResume", training.PACKAGES[0])(directory, keep=1, every_n_train_steps=2)
    callbacks = [Fills(), resume]
    strategy = training.strategy_class()(async_save=True)
    options = {"enable_checkpointing": True, "max_steps": max_steps, "max_epochs": -1}
    fitter = training.trainer(pl, strategy=strategy, callbacks=callbacks, **options)
    try:
        fitter.fit(training.language_model(pl), training.loader())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        # The training has gone on until the next save, or to its end.
        assert steps == list(range(max_steps)), steps
        assert not any(each.name == THREAD for each in threading.enumerate())


@pytest.mark.parametrize("max_steps", [6, 5])
def test_a_full_disk_ends_the_run_at_the_next_save(gloo: ProcessPool, tmp_path: Path, max_steps: int) -> None:
    with pytest.raises(RanksFailedError, match=r"File too large: '.*step=4\.ckpt/__1_0\.distcp'") as failed:
        gloo.run(_fail, str(tmp_path), max_steps, world_size=2)
    assert sorted(failed.value.failures) == [0, 1]
    for failure in failed.value.failures.values():
        assert "__1_0.distcp" in failure.message
    (path,) = newest_first(tmp_path)
    assert "step=2" in path.name and damages(path) == [] and _names(tmp_path) == [path.name]


def _end(directory: str, is_signal: bool) -> None:
    """A rank fails, or is told to end, while a checkpoint is written."""
    pl, gate = training.load(), _gate()

    class Ends(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(Path(directory) / "saved.ckpt")
                # After an exception the other rank would end its process before the save has ended.
                threading.Timer(2.0 if is_signal else 7.0, gate.set).start()
            if trainer.global_step == 3 and trainer.global_rank == 1:
                assert any(thread.name == THREAD for thread in threading.enumerate())
                if not is_signal:
                    raise ValueError("the user's")
                os.kill(os.getpid(), signal.SIGTERM)

    strategy = training.strategy_class()(async_save=True)
    fitter = training.trainer(pl, strategy=strategy, callbacks=[Ends()], max_steps=5000, max_epochs=-1)
    try:
        fitter.fit(training.language_model(pl), training.loader())
    except SystemExit as error:
        raise RuntimeError(f"exit code {error.code}") from error


@pytest.mark.parametrize("is_signal", [False, True], ids=["exception", "sigterm"])
def test_a_run_that_ends_early_finishes_its_save(gloo: ProcessPool, tmp_path: Path, is_signal: bool) -> None:
    with pytest.raises(RanksFailedError) as failed:
        gloo.run_fresh(_end, str(tmp_path), is_signal, world_size=2)
    for failure in failed.value.failures.values():
        assert ("exit code 143" if is_signal else "the user's") in failure.message
    assert failed.value.exit_codes == ({} if is_signal else {0: 1})
    assert is_signal or "rank 0 ends: rank 1 has failed: ValueError: the user's" in str(failed.value)
    assert _names(tmp_path) == ["saved.ckpt"] and damages(tmp_path / "saved.ckpt") == []
