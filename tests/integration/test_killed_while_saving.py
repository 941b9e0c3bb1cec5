"""All ranks are killed while a Trainer overwrites its checkpoint: the run goes on from all of one epoch, exactly."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.integration import training
from tests.support.outcome import RanksFailedError
from tests.support.processes import ProcessPool

NUM_EPOCHS, _NUM_STEPS = 3, 2
# What changes a file system, or opens a file, as Python's audit events call it.
CHANGES = "open|os.mkdir|os.rename|os.remove|os.rmdir"


def fit(directory: str, *, resume: str | None = None) -> tuple[list[float], Any]:
    """Overwrite ``last.ckpt`` after each epoch; losses and weights."""
    pl = training.load()
    model = training.language_model(pl, seed=1 if resume else 0)
    callback = pl.callbacks.ModelCheckpoint(dirpath=directory, filename="last", enable_version_counter=False)
    fitter = training.trainer(
        pl,
        strategy=training.strategy_class()(),
        callbacks=[callback],
        enable_checkpointing=True,
        max_epochs=NUM_EPOCHS,
        limit_train_batches=_NUM_STEPS,
    )
    fitter.fit(model, training.loader(), ckpt_path=resume, weights_only=False)
    return model.losses, training.full_weights(model)


def _observe(events: str, name: str, do: Callable[[], None]) -> None:
    """Call ``do`` before each of ``events`` to a path that matches ``name``, as long as this process lives."""

    def observe(what: str, args: tuple[Any, ...]) -> None:
        if re.fullmatch(events, what) and args and re.search(name, str(args[0])):
            do()

    sys.addaudithook(observe)


def count_changes(directory: str) -> int:
    """How often :func:`fit` changes something in ``directory``, on this rank."""
    seen: list[None] = []
    _observe(CHANGES, re.escape(directory), lambda: seen.append(None))
    fit(directory)
    return len(seen)


def fit_killed(directory: str, rank: int, events: str, name: str, *, count: int, seconds: float = 0.5) -> None:
    """As :func:`fit`, until ``rank`` is about to do one of ``events`` to a path that matches, for the n-th time.

    It is slow: for so many ``seconds`` the others go on, as far as they can without it. Then all are killed.
    """
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    left = count

    def kill() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            time.sleep(seconds)
            for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
                os.kill(pid, signal.SIGKILL)

    if dist.get_rank() == rank:
        _observe(events, name, kill)
    fit(directory)


def require_resumed(pool: ProcessPool, directory: Path, whole: tuple[list[float], Any]) -> int:
    """Go on from ``directory``, and return the number of its epochs; raises unless losses and weights are equal."""
    losses, weights = whole
    # A Trainer finds the last one by looking into the directory, before it asks the strategy.
    resumed = pool.run(fit, str(directory), resume="last", world_size=2)
    num_epochs = NUM_EPOCHS - len(resumed[0][0]) // _NUM_STEPS
    assert resumed[0][0] == losses[num_epochs * _NUM_STEPS :]
    assert resumed[1][0] == resumed[0][0], "all ranks load the same epoch"
    assert training.max_difference(resumed[0][1], weights) == 0.0
    left = [path.name for path in directory.iterdir()]
    # A save that comes clears away what one before it has left.
    assert left == ["last.ckpt"] or num_epochs == NUM_EPOCHS, left
    return num_epochs


def test_a_run_that_was_killed_while_it_saved_goes_on_exactly(gloo: ProcessPool, tmp_path: Path) -> None:
    whole = gloo.run(fit, str(tmp_path / "reference"), world_size=2)[0]
    for num_epochs, *place in (
        # The last rank is about to write its shard of the second epoch; the other one has.
        (1, 1, "open", "__1_0.distcp"),
        # The new checkpoint has taken the place of the old one, which is still there.
        (2, 0, "shutil.rmtree", r"\.unfinished-\w+$"),
    ):
        directory = tmp_path / str(num_epochs)
        with pytest.raises(RanksFailedError):
            gloo.run_fresh(fit_killed, str(directory), *place, count=2, world_size=2)
        assert require_resumed(gloo, directory, whole) == num_epochs, place
