"""A disk that is full, or read-only: one error on all ranks, and a program that catches it trains on as before."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_muon.checkpoint.manifest import damages, describe
from tests.integration import training
from tests.support.processes import ProcessPool

_KIBIBYTES = 900


@contextmanager
def small_disk(path: Path) -> Generator[Path]:
    """A file system of its own, with room for two checkpoints; skips the test unless this is root."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_KIBIBYTES}k", "none", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system takes root")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def _change_disk(directory: str, step: int) -> None:
    """Fill it before the second save, and make it read-only before the third one."""
    filler = Path(directory, "filler")
    if step == 3:
        free = os.statvfs(directory).f_bavail * os.statvfs(directory).f_bsize
        filler.write_bytes(bytes(free - 20_000))
    if step > 3:
        subprocess.run(["mount", "-o", "remount,rw", directory], check=True)
        filler.unlink(missing_ok=True)
    if step == 5:
        subprocess.run(["mount", "-o", "remount,ro", directory], check=True)


def _train(directory: str, *, changes: bool) -> tuple[list[float], list[str], list[int]]:
    """Losses; the errors of saves after the third and the fifth step; what is intact after each save."""
    pl, errors, intact = training.load(), list[str](), list[int]()
    model = training.language_model(pl)

    class Saves(pl.Callback):
        def on_train_batch_end(self, fitter: Any, *_: Any) -> None:
            if fitter.global_step % 2 == 0:
                return
            if changes and dist.get_rank() == 0:
                _change_disk(directory, fitter.global_step)
            dist.barrier()
            start = time.monotonic()
            try:
                fitter.save_checkpoint(f"{directory}/last.ckpt")
            except (OSError, RuntimeError) as error:
                errors.append(str(error))
            assert time.monotonic() - start < 30
            path = Path(directory, "last.ckpt")
            intact.append((describe(path) or {})["step"] if damages(path) == [] else -1)
            dist.barrier()

    data = DataLoader(training.dataset(), 2, shuffle=True)
    training.trainer(pl, strategy=training.strategy_class()(), callbacks=[Saves()], max_steps=8).fit(model, data)
    return model.losses, errors, intact


def test_a_disk_that_takes_nothing_stops_no_training(gloo: ProcessPool, tmp_path: Path) -> None:
    """A training goes on as before after saves to a full and to a read-only disk, with the old one intact."""
    whole = gloo.run(_train, str(tmp_path), changes=False, world_size=2)
    with small_disk(tmp_path / "disk") as disk:
        changed = gloo.run(_train, str(disk), changes=True, world_size=2)
    for (losses, none, _), (others, errors, intact) in zip(whole, changed, strict=True):
        assert others == losses and none == []
        assert len(errors) == 2, errors
        for error, reason in zip(errors, ("No space left on device", "Read-only file system"), strict=True):
            assert reason in error
        assert intact == [1, 1, 1, 7]
