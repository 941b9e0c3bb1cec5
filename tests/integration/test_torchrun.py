"""``torchrun --max-restarts`` and ``AutoResume``: a run whose ranks are killed has the losses of an unbroken one."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_muon.comm.rendezvous import store_of_attempt
from tests.support.warm_python import warm_python

_PROGRAM = """
import os, signal, sys
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lightning_muon import AutoResume

folder, kills = sys.argv[1], int(sys.argv[2])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


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


def _losses(folder: Path, kills: int) -> list[list[str]]:
    folder.mkdir()
    program = folder / "program.py"
    program.write_text(_PROGRAM)
    command = [warm_python(), "-m", "torch.distributed.run", "--nproc-per-node=2", f"--max-restarts={kills}"]
    ended = subprocess.run(
        [*command, "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(program), str(folder), str(kills)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [(folder / f"losses{rank}").read_text().splitlines() for rank in range(2)]


@pytest.mark.slow
def test_killed_ranks_come_back_with_equal_bits(tmp_path: Path) -> None:
    whole, broken = _losses(tmp_path / "whole", 0), _losses(tmp_path / "broken", 1)
    for before, after in zip(whole, broken, strict=True):
        assert len(before) == 9 and len(after) > 9
        assert after[-5:] == before[-5:] and set(after) == set(before)


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
