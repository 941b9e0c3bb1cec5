"""Whether a long training stays what it is: memory, threads, descriptors and time per step, with regular saves.

    python benchmarks/steady.py

A Trainer with 2 processes takes 3,000 steps of a small model in each mode, and ``AutoResume`` saves each 100 steps. The
rows compare the steps 500 to 1,000 with the last 500, on the rank where they differ most. Time is that of a processor,
of all threads, and the least of all windows of 10 steps: what other programs do to caches and clocks only adds to it.
After each window each rank repeats the same work, products of small matrices, by which a machine that has become slower
as a whole is told from steps that have.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_muon import AutoResume, DCTTopK, FlexDeMoConfig, ParallelMuonStrategy

STRATEGIES: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "zero2": {"sharding": "zero2"},
    "FlexDeMo": {"optimizer": FlexDeMoConfig(base="adamw", replicator=DCTTopK(chunk_size=16)), "replicate_size": 2},
}
_COLUMNS = ("MiB of memory", "threads", "descriptors", "CPU ms of the same work", "CPU ms per step", "step / same work")


class Model(pl.LightningModule):
    """Two layers on random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Local."""
        return F.mse_loss(self.net(batch[0]), batch[0].flip(1))

    def configure_optimizers(self) -> Any:
        """Local."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _same_work() -> float:
    """Seconds of a processor for work that never changes; local."""
    matrix, start = torch.eye(64), time.thread_time()
    for _ in range(300):
        matrix = matrix @ matrix
    return time.thread_time() - start


def _now() -> list[float]:
    """What the columns have but for the last one, with the sum of time; local."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    memory, threads = (float(status[key].split()[0]) for key in ("VmRSS", "Threads"))
    descriptors = len(os.listdir("/proc/self/fd"))
    return [memory / 1024, threads, float(descriptors), 1000 * _same_work(), 1000 * time.process_time()]


class Sampler(pl.Callback):
    """Notes every 10 steps what the process takes."""

    every = 10

    def __init__(self) -> None:
        self.samples: list[list[float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Local."""
        if trainer.global_step % self.every == self.every // 2:
            self.samples.append(_now())

    def columns(self, first: int, last: int) -> list[float]:
        """Medians, and the least times, between two steps."""
        samples = self.samples[first // self.every : last // self.every]
        *kept, works, _ = zip(*samples, strict=True)
        # The work itself belongs to no step.
        step = min((two[-1] - one[-1] - two[-2]) / self.every for one, two in pairwise(samples))
        return [*map(statistics.median, kept), min(works), step, step / min(works)]


def train(name: str, num_steps: int) -> None:
    """One mode; rank 0 prints its row. Collective over all ranks; every rank must call it."""
    # Each rank stays on a core of its own: which ranks share caches must not change while they are timed.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ.get("LOCAL_RANK", "0")) % len(cores)]})
    sampler, strategy = Sampler(), ParallelMuonStrategy(**STRATEGIES[name])
    rows = torch.randn(4000, 64, generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as folder:
        resume = AutoResume(os.environ.setdefault("STEADY_FOLDER", folder), every_n_train_steps=100)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_steps=num_steps,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[resume, sampler],
        )
        trainer.fit(Model(), DataLoader(TensorDataset(rows), batch_size=8))
        pairs: list[Any] = [None] * dist.get_world_size()
        early, late = sampler.columns(num_steps // 6, num_steps // 3), sampler.columns(num_steps * 5 // 6, num_steps)
        dist.all_gather_object(pairs, (early, late))
    if dist.get_rank() == 0:
        cells: list[str] = []
        for column in range(len(_COLUMNS)):
            before, after = max(((a[column], b[column]) for a, b in pairs), key=lambda pair: pair[1] / pair[0])
            digits = 2 if column > 2 else 0 if column else 1
            cells.append(f"{before:.{digits}f} -> {after:.{digits}f} ({after / before - 1:+.1%})")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print the rows of the table in docs/reliability.md, or the one of a mode."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=STRATEGIES)
    parser.add_argument("--steps", type=int, default=3000)
    arguments = parser.parse_args()
    if arguments.mode:
        train(arguments.mode, arguments.steps)
        return
    print(f"| | {' | '.join(_COLUMNS)} |", flush=True)
    for name in STRATEGIES:
        subprocess.run([sys.executable, __file__, "--mode", name, "--steps", str(arguments.steps)], check=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
