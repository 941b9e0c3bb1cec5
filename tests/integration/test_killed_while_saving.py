"""All ranks are killed while a Trainer overwrites its checkpoint: the run goes on from all of one epoch, exactly."""

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.integration import training
from tests.support.processes import ProcessPool, RanksFailedError

_NUM_EPOCHS, _NUM_STEPS = 3, 2


def _fit(directory: str, *, resume: str | None = None) -> tuple[list[float], Any]:
    """Overwrite ``last.ckpt`` after each epoch; losses and weights."""
    pl = training.load()
    model = training.language_model(pl, seed=1 if resume else 0)
    callback = pl.callbacks.ModelCheckpoint(dirpath=directory, filename="last", enable_version_counter=False)
    fitter = training.trainer(
        pl,
        strategy=training.strategy_class()(),
        callbacks=[callback],
        enable_checkpointing=True,
        max_epochs=_NUM_EPOCHS,
        limit_train_batches=_NUM_STEPS,
    )
    fitter.fit(model, training.loader(), ckpt_path=resume, weights_only=False)
    return model.losses, training.full_weights(model)


def _fit_killed(directory: str, rank: int, events: str, name: str) -> None:
    """As :func:`_fit`, until ``rank`` is about to do one of ``events`` to a path that matches, for the second time.

    It is slow: for half a second the others go on, as far as they can without it. Then all are killed.
    """
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    left = 2

    def observe(what: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        if re.fullmatch(events, what) and args and re.search(name, str(args[0])):
            left -= 1
            if left == 0:
                time.sleep(0.5)
                for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
                    os.kill(pid, signal.SIGKILL)

    if dist.get_rank() == rank:
        sys.addaudithook(observe)
    _fit(directory)


def test_a_run_that_was_killed_while_it_saved_goes_on_exactly(gloo: ProcessPool, tmp_path: Path) -> None:
    losses, weights = gloo.run(_fit, str(tmp_path / "reference"), world_size=2)[0]
    for num_epochs, *place in (
        # The last rank is about to write its shard of the second epoch; the other one has.
        (1, 1, "open", "__1_0.distcp"),
        # The new checkpoint has taken the place of the old one, which is still there.
        (2, 0, "shutil.rmtree", r"\.unfinished-\w+$"),
    ):
        directory = tmp_path / str(num_epochs)
        with pytest.raises(RanksFailedError):
            gloo.run_fresh(_fit_killed, str(directory), *place, world_size=2)
        # A Trainer finds the last one by looking into the directory, before it asks the strategy.
        resumed = gloo.run(_fit, str(directory), resume="last", world_size=2)
        assert resumed[0][0] == resumed[1][0] == losses[num_epochs * _NUM_STEPS :], place
        assert training.max_difference(resumed[0][1], weights) == 0.0
        # A save that comes clears away what one before it has left.
        assert [path.name for path in directory.iterdir()] == ["last.ckpt"]
