"""Kills ranks at random times, restarts the program, and compares every loss with that of a run that nobody killed.

    python -m tests.long.soak --kills 200 --seed 1

A small language model with dropout is trained by a Trainer with ``AutoResume``. At a random optimizer step one rank,
chosen at random, gets SIGKILL at a random time after the beginning of its forward pass, backward pass, optimizer step
or save; the others must end by themselves. Then the program is started again, and goes on from the newest intact
checkpoint. The kills of one training are a series; series take turns through the ways of sharding.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_muon import FlexDeMoConfig
from lightning_muon.flexdemo.replicators import DCTTopK
from lightning_muon.integrations.registry import make, strategy_class
from tests.support.processes import ProcessPool, RanksFailedError

_SPARSE = FlexDeMoConfig(replicator=DCTTopK(chunk_size=8, top_k=2))
# Name -> (number of ranks, options of the strategy).
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (2, {}),
    "zero2": (2, {"sharding": "zero2"}),
    "hsdp": (4, {"replicate_size": 2, "shard_size": 2}),
    "flexdemo": (2, {"replicate_size": 2, "optimizer": _SPARSE}),
    "async": (2, {"async_save": True}),
    "pipeline": (2, {"pipeline_size": 2, "pipeline_microbatches": 2}),
}
# Hook with which a phase begins -> up to how many seconds later the rank is killed.
PHASES = {
    "on_train_batch_start": 0.03,  # forward
    "on_before_backward": 0.02,
    "on_before_optimizer_step": 0.03,
    "on_save_checkpoint": 0.08,
}
SECONDS_TO_END = 15.0  # For the ranks that are left.


@dataclass(frozen=True)
class Kill:
    """Which rank dies, and when."""

    rank: int
    step: int
    phase: str
    seconds: float


def _write_losses(folder: Path) -> Any:
    """A callback that writes the loss of every step to ``folder`` before it is saved."""
    import lightning.pytorch as pl

    def write(trainer: Any, _: Any, outputs: Any, *__: Any) -> None:
        with (folder / f"losses{trainer.global_rank}").open("a") as file:
            file.write(f"{trainer.global_step} {outputs['loss'].item()!r}\n")

    return pl.callbacks.LambdaCallback(on_train_batch_end=write)


@cache
def _model_class() -> type[Any]:
    import lightning.pytorch as pl

    class Model(pl.LightningModule):
        """Linear layers with dropout."""

        def __init__(self, kill: Kill | None) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.kill = kill
            blocks = (nn.Sequential(nn.Linear(16, 24), nn.Dropout(0.2), nn.ReLU(), nn.Linear(24, 16)) for _ in range(2))
            self.parts = nn.ModuleList([nn.Embedding(23, 16), *blocks, nn.Linear(16, 23)])

        def pipeline_parts(self) -> list[nn.Module]:
            return list(self.parts)

        def pipeline_loss(self, output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
            return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()

        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
            x = batch[0]
            for part in self.parts:
                x = part(x)
            return F.cross_entropy(x.flatten(0, 1), batch[1].flatten())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)

    def begin(phase: str) -> Any:
        def run(self: Any, *_: Any) -> None:
            kill = self.kill
            if kill and (kill.rank, kill.phase) == (self.global_rank, phase) and self.global_step >= kill.step:
                threading.Timer(kill.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()

        return run

    for phase in PHASES:
        setattr(Model, phase, begin(phase))
    return Model


def train(folder: str, mode: str, num_steps: int, kill: Kill | None) -> tuple[int, str]:
    """Where the run began, and a hash of this rank's weights and optimizer states at its end. Collective."""
    os.environ["TORCHELASTIC_RUN_ID"] = "soak"  # Lightning launches no further processes.
    import lightning.pytorch as pl

    tokens = torch.randint(0, 23, (40, 6), generator=torch.Generator().manual_seed(7))
    num_ranks, options = MODES[mode]
    model, started = _model_class()(kill), list[int]()
    model.on_train_start = lambda: started.append(model.global_step)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy=strategy_class("lightning.pytorch")(**options),
        max_steps=num_steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            _write_losses(Path(folder)),
            make("AutoResume", "lightning.pytorch")(f"{folder}/checkpoints", every_n_train_steps=2),
        ],
    )
    data = TensorDataset(tokens, (3 * tokens + 1) % 23)
    trainer.fit(model, DataLoader(data, batch_size=4, shuffle=True))
    digest = hashlib.sha256()
    states = [value for state in trainer.optimizers[0].state.values() for _, value in sorted(state.items())]
    for tensor in (*model.parameters(), *(value for value in states if isinstance(value, Tensor))):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        digest.update(local.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return started[0], digest.hexdigest()


def _losses(folder: Path, rank: int) -> list[str]:
    path = folder / f"losses{rank}"
    return path.read_text().splitlines() if path.exists() else []


def _survive(pool: ProcessPool, folder: Path, mode: str, num_steps: int, kill: Kill | None) -> list[Any] | None:
    """One start of the program: the results of all ranks, or ``None`` if a rank was killed and the others ended."""
    start = time.monotonic()
    try:
        return pool.run(
            train, str(folder), mode, num_steps, kill, world_size=MODES[mode][0], timeout=120.0, grace=SECONDS_TO_END
        )
    except RanksFailedError as error:
        took = time.monotonic() - start
        if kill is None or error.running or error.exit_codes.get(kill.rank) != -signal.SIGKILL:
            raise AssertionError(f"{mode}, {kill}, {took:.1f} s: not only that rank was to die") from error
        return None


def run_series(pool: ProcessPool, folder: Path, mode: str, *, kills: int, num_steps: int, draw: random.Random) -> str:
    """Train with so many kills, and compare with a run without; one line about it.

    Raises:
        AssertionError: If a rank hangs, or a loss, weights or optimizer states are others than without kills.
    """
    num_ranks, counts, begun = MODES[mode][0], Counter[str](), time.monotonic()
    for name in ("whole", "killed"):
        (folder / name).mkdir()
    whole = _survive(pool, folder / "whole", mode, num_steps, None)
    results, killed = None, 0
    while results is None:
        phase, first = draw.choice(list(PHASES)), killed * num_steps // (kills + 1)
        step = draw.randrange(first, first + num_steps // (kills + 1) + 1)
        kill = Kill(draw.randrange(num_ranks), step, phase, draw.uniform(0.0, PHASES[phase]))
        results = _survive(pool, folder / "killed", mode, num_steps, kill if killed < kills else None)
        killed += results is None
        counts[phase] += results is None
    assert killed == kills and whole is not None, f"{mode}: {killed} of {kills} kills came before the end"
    for rank in range(num_ranks):
        before, after = _losses(folder / "whole", rank), _losses(folder / "killed", rank)
        others = sorted(set(after) ^ set(before))
        assert len(before) == num_steps and not others, f"{mode}: losses of rank {rank} differ: {others}"
        assert results[rank][1] == whole[rank][1], f"{mode}: weights or states of rank {rank} differ"
    again = len(_losses(folder / "killed", 0)) - num_steps
    spread = ", ".join(f"{phase} {number}" for phase, number in sorted(counts.items()) if number)
    return f"{mode}: {killed} kills ({spread}); {again} steps run again; {time.monotonic() - begun:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--per-series", type=int, default=10)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    options = parser.parse_args()
    multiprocessing.set_forkserver_preload(["tests.support.preloaded"])
    print(f"--seed {options.seed}", flush=True)
    pool, done, number = ProcessPool(), 0, 0
    while done < options.kills:
        draw, kills = random.Random(f"{options.seed} {number}"), min(options.per_series, options.kills - done)
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            mode = options.modes[number % len(options.modes)]
            print(run_series(pool, Path(folder), mode, kills=kills, num_steps=3 * kills + 4, draw=draw), flush=True)
        done, number = done + kills, number + 1
    pool.close()
    print(f"{done} kills: every loss, and the weights at the end, are those of runs without")


if __name__ == "__main__":
    main()
