"""Whether a long training stays what it is: memory, threads, descriptors and time per step, with regular saves.

    python benchmarks/steady.py

A Trainer with 2 processes takes 6,000 steps of a small model in each mode, and ``AutoResume`` saves each 100 steps. The
rows compare the steps 1,000 to 2,000 with the last 1,000, by medians, on the rank where they differ most. What a step
does is counted: calls of functions, of Python and of C, in 10 steps of each 100, and the Python objects that live.

What it takes is measured: the time of a processor, of all threads. The speed of two processes that wait for each other
changes by itself over minutes, by far more than 1 %. So each 10 steps are followed by 10 steps of a plain loop in the
same processes, torch's FSDP2 and AdamW on a model of the same kind. The last column is the time of the former over that
of the latter, with the standard error of the difference.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from math import hypot
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_muon import AutoResume, DCTTopK, FlexDeMoConfig, ParallelMuonStrategy

STRATEGIES: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "zero2": {"sharding": "zero2"},
    "FlexDeMo": {"optimizer": FlexDeMoConfig(base="adamw", replicator=DCTTopK(chunk_size=16)), "replicate_size": 2},
}
_HELD = ("MiB of memory", "threads", "descriptors", "Python objects")
_COLUMNS = (*_HELD, "calls per step", "CPU ms per plain step", "CPU ms per step", "step / plain step")


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))


class Model(pl.LightningModule):
    """Two layers on random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = _layers()

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Local."""
        return F.mse_loss(self.net(batch[0]), batch[0].flip(1))

    def configure_optimizers(self) -> Any:
        """Local."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class PlainLoop:
    """The same kind of training by torch alone. Collective over all ranks; every rank must call it."""

    def __init__(self) -> None:
        self._net = _layers()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (self._net[0], self._net[2], self._net):
            fully_shard(module, mesh=mesh)
        self._optimizer = torch.optim.AdamW(self._net.parameters(), lr=1e-3)
        self._rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))

    def step(self) -> None:
        """Forward, backward, step."""
        F.mse_loss(self._net(self._rows), self._rows.flip(1)).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def _cpu_ms() -> float:
    return 1000 * time.process_time()


def _held() -> list[float]:
    """What the first columns have; local."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    memory, threads = (float(status[key].split()[0]) for key in ("VmRSS", "Threads"))
    return [memory / 1024, threads, float(len(os.listdir("/proc/self/fd"))), float(len(gc.get_objects()))]


class Sampler(pl.Callback):
    """Notes every 10 steps what the process holds and what these steps took; of one block in ten, what they called."""

    every = 10

    def __init__(self) -> None:
        self.columns: list[list[tuple[int, float]]] = [[] for _ in _COLUMNS]
        self._plain: PlainLoop | None = None
        self._begin = 0.0
        self._num_calls = 0

    def _count(self, _: Any, event: str, __: Any) -> None:
        self._num_calls += event in ("call", "c_call")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Collective over all ranks; every rank must call it."""
        if trainer.global_step % self.every != self.every // 2:
            return
        steps, counts = _cpu_ms() - self._begin, sys.getprofile() is not None
        sys.setprofile(None)
        self._plain = self._plain or PlainLoop()
        begin = _cpu_ms()
        for _ in range(self.every):
            self._plain.step()
        plain = _cpu_ms() - begin
        taken = [None, plain / self.every, steps / self.every, steps / plain]
        values = [*_held(), *([self._num_calls / self.every] if counts else taken)]
        for column, value in zip(self.columns, values, strict=False):
            if value is not None:
                column.append((trainer.global_step, value))
        # Steps without a save and without the end of an epoch.
        if trainer.global_step % 100 == 25:
            self._num_calls = 0
            sys.setprofile(self._count)
        self._begin = _cpu_ms()

    def medians(self, first: int, last: int) -> list[tuple[float, float]]:
        """Of each column between two steps, with their standard errors."""
        # Of normally distributed values: quartiles are 1.35 deviations apart, and a median varies 1.25 times as much as
        # a mean.
        chosen = [[value for step, value in column if first <= step < last] for column in self.columns]
        return [
            (median, 1.25 * (third - one) / 1.35 / len(column) ** 0.5)
            for column in chosen
            for one, median, third in [statistics.quantiles(column)]
        ]


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
        early, late = sampler.medians(num_steps // 6, num_steps // 3), sampler.medians(num_steps * 5 // 6, num_steps)
        dist.all_gather_object(pairs, (early, late))
    if dist.get_rank() == 0:
        cells: list[str] = []
        for column in range(len(_COLUMNS)):
            both = [(early[column], late[column]) for early, late in pairs]
            (before, error), (after, error_after) = max(both, key=lambda pair: pair[1][0] / pair[0][0])
            digits = 2 if column > 4 else 0 if column else 1
            spread = f" +- {hypot(error, error_after) / before:.1%}" if column == len(_COLUMNS) - 1 else ""
            cells.append(f"{before:,.{digits}f} -> {after:,.{digits}f} ({after / before - 1:+.2%}{spread})")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print the rows of the table in docs/reliability.md, or the one of a mode."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=STRATEGIES)
    parser.add_argument("--steps", type=int, default=6000)
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
