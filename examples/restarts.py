"""A training that is killed, and goes on by itself from its newest intact checkpoint.

    torchrun --nproc_per_node 2 --max-restarts 2 examples/restarts.py --kill-at 6

Rank 1 of the first attempt gets SIGKILL, as from the kernel when memory runs out. The other rank ends, torchrun starts
both again, and ``AutoResume`` finds where to go on: a loss that is printed twice is the same to the last bit. After
SIGTERM or Ctrl-C the program has saved when it ends, and goes on from there when it is started again.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_muon import AutoResume


class Denoiser(LightningModule):
    """Two layers with dropout, whose random numbers are those of the unbroken run, too."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.options = options
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 8))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The loss of one batch."""
        is_first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if is_first_attempt and self.global_step == self.options.kill_at and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.options.seconds_per_step)
        loss = self.net(batch[0]).square().mean()
        print(f"rank {self.global_rank}, step {self.global_step}: {loss.item()!r}", flush=True)
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW, which becomes ParallelMuon with the same learning rate."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    """Train, or go on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="checkpoints")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seconds-per-step", type=float, default=0.2)
    parser.add_argument("--kill-at", type=int, default=-1, help="the step in which rank 1 is killed")
    options = parser.parse_args()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="parallel_muon",
        max_steps=options.steps,
        logger=False,
        enable_progress_bar=False,
        callbacks=[AutoResume(options.folder, every_n_train_steps=4)],
    )
    rows = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    trainer.fit(Denoiser(options), DataLoader(TensorDataset(rows), batch_size=4, shuffle=True))


if __name__ == "__main__":
    main()
