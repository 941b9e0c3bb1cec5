"""Programs with ``AutoResume`` whose ranks are killed, or that are told to end, have the losses of a whole run.

The launchers are ``torchrun --max-restarts`` and the Trainer's own.
"""

from __future__ import annotations

import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_muon.comm.rendezvous import store_of_attempt
from tests.support.programs import is_alive, program_environment
from tests.support.warm_python import warm_python

_PROGRAM = """
import os, signal, sys, time
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lightning_muon import AutoResume

folder, kills, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
with open(f"{folder}/pids", "a") as file:
    file.write(f"{os.getpid()}\\n")


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 8))

    def training_step(self, batch, batch_idx):
        if attempt < kills and self.global_step == 5 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = self.net(batch[0]).square().mean()
        with open(f"{folder}/losses{self.global_rank}", "a") as file:
            file.write(f"{self.global_step} {loss.item()!r}\\n")
        time.sleep(pause)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


rows = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy="parallel_muon", max_steps=9, logger=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=[AutoResume(f"{folder}/checkpoints", every_n_train_steps=2)],
)
trainer.fit(Model(), DataLoader(TensorDataset(rows), batch_size=4, shuffle=True))
"""


_TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")


def _start(folder: Path, *launcher: str, kills: int = 0, pause: float = 0.0) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    program = folder / "program.py"
    program.write_text(_PROGRAM)
    return subprocess.Popen(
        [warm_python(), *launcher, str(program), str(folder), str(kills), str(pause)],
        env=program_environment(),
        stderr=subprocess.PIPE,
        text=True,
    )


def _end(started: subprocess.Popen[str], folder: Path, code: int = 0) -> list[list[str]]:
    """The losses of both ranks, once the program has ended with this code."""
    _, errors = started.communicate(timeout=150)
    assert started.returncode == code, errors[-3000:]
    deadline = time.monotonic() + 5
    while any(is_alive(int(pid)) for pid in (folder / "pids").read_text().split()):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.05)
    return [(folder / f"losses{rank}").read_text().splitlines() for rank in range(2)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The losses of a run that nobody ends."""
    folder = tmp_path_factory.mktemp("whole")
    return _end(_start(folder), folder)


@pytest.mark.slow
def test_killed_ranks_come_back_with_equal_bits(whole: list[list[str]], tmp_path: Path) -> None:
    broken = _end(_start(tmp_path, *_TORCHRUN, "--max-restarts=1", kills=1), tmp_path)
    for before, after in zip(whole, broken, strict=True):
        assert len(before) == 9 and len(after) > 9
        assert after[-5:] == before[-5:] and set(after) == set(before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "number", "code"),
    [(_TORCHRUN, signal.SIGTERM, 1), ((), signal.SIGTERM, 143), ((), signal.SIGINT, 130)],
    ids=["torchrun", "Trainer", "Ctrl-C"],
)
def test_a_launcher_that_is_told_to_end_saves(
    whole: list[list[str]], tmp_path: Path, launcher: tuple[str, ...], number: int, code: int
) -> None:
    started = _start(tmp_path, *launcher, pause=0.3)
    while not (tmp_path / "losses1").exists():
        assert started.poll() is None
        time.sleep(0.05)
    started.send_signal(number)
    told = _end(started, tmp_path, code)
    assert all(0 < len(losses) < 9 for losses in told), "no batch is lost, and none comes after the signal is answered"
    assert _end(_start(tmp_path), tmp_path) == whole


def test_an_attempt_meets_in_a_store_without_old_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    with ThreadPoolExecutor(3) as threads:
        for _ in range(3):
            stores = list(threads.map(lambda rank: store_of_attempt(rank, 3, timedelta(seconds=20)), (2, 0, 1)))
            assert not any(store.check(["address"]) for store in stores)
            stores[0].set("address", "rank 2")
            assert [store.get("address") for store in stores] == [b"rank 2"] * 3
    with pytest.raises(TimeoutError, match="rank 0 has not come"):
        store_of_attempt(1, 3, timedelta(seconds=0.3))
