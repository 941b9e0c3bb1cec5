"""All ranks are killed while a Trainer overwrites its checkpoint: the run goes on from all of one step, exactly."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from tests.integration.training import (
    PACKAGES,
    full_weights,
    language_model,
    load,
    loader,
    max_difference,
    strategy_class,
    trainer,
)
from tests.support.outcome import RanksFailedError
from tests.support.processes import ProcessPool

_STEPS = 6


class _Slow(FileSystemWriter):
    """Seconds to write are those of a slow disk, on the last rank only."""


def _fit(directory: str, *, resume: str | None = None, sharded: bool = True) -> tuple[int, list[float], Any]:
    """Overwrite ``last.ckpt`` every second step; the step at which this run began, losses, weights."""
    pl = load(PACKAGES[0])
    model = language_model(pl, seed=1 if resume else 0)
    callback = pl.callbacks.ModelCheckpoint(
        dirpath=directory, save_top_k=0, save_last=True, every_n_train_steps=2, enable_version_counter=False
    )
    fitter = trainer(
        pl,
        strategy=strategy_class(PACKAGES[0])(save_distributed_checkpoint=sharded),
        callbacks=[callback],
        enable_checkpointing=True,
        max_epochs=1,
        limit_train_batches=_STEPS,
    )
    fitter.fit(model, loader(), ckpt_path=resume, weights_only=False)
    return _STEPS - len(model.losses), model.losses, full_weights(model)


def _fit_killed(directory: str, event: str, name: str, *, num_before: int, sharded: bool = True) -> None:
    """As :func:`_fit`, until rank 0 is about to do ``event`` to a path with ``name`` in it, for the n-th time."""
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    count = 0

    def observe(what: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if what != event or not args or name not in str(args[0]):
            return
        if dist.get_rank() == dist.get_world_size() - 1 and event == "open":
            time.sleep(0.3)  # A slow disk: the others have written all they have.
        count += 1
        if count > num_before and dist.get_rank() == (dist.get_world_size() - 1 if event == "open" else 0):
            for pid in reversed(sorted(pids, key=lambda pid: pid == os.getpid())):
                os.kill(pid, signal.SIGKILL)

    sys.addaudithook(observe)
    _fit(directory, sharded=sharded)


# Where all ranks are killed; each step with a save has one of it. Two saves come before.
_POINTS = {
    "while the last rank still writes its shard of step 4": ("open", "__1_0.distcp", 2, 2),
    "with the draft of step 4 complete": ("os.rename", ".unfinished-", 1, 2),
    "with the draft of step 6 complete, which counts from now on": ("os.rename", "last.ckpt/.metadata", 1, 6),
}
