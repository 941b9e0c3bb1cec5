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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_muon import FlexDeMoConfig
from lightning_muon.flexdemo.replicators import DCTTopK
from lightning_muon.integrations.registry import make
from lightning_muon.params.layout import local_tensor
from tests.integration.training import VOCABULARY, dataset, language_model, load, loss_of, strategy_class, trainer
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


def _network() -> nn.Module:
    blocks = (nn.Sequential(nn.Linear(16, 24), nn.Dropout(0.2), nn.ReLU(), nn.Linear(24, 16)) for _ in range(2))
    return nn.Sequential(nn.Embedding(VOCABULARY, 16), *blocks, nn.Linear(16, VOCABULARY))


def _model(pl: Any, folder: str, kill: Kill | None) -> Any:
    """Writes the loss of every step to ``folder`` before it is saved."""
    model = language_model(pl, network=_network)
    kind: Any = type(model)
    kind.pipeline_parts = lambda self: list(self.network)
    kind.pipeline_loss = lambda _, output, targets: (loss_of(output, targets) * targets.numel(), targets.numel())

    def on_train_batch_end(self: Any, outputs: Any, *_: Any) -> None:
        with Path(folder, f"losses{self.global_rank}").open("a") as file:
            file.write(f"{self.global_step} {outputs['loss'].item()!r}\n")

    def begin(phase: str, self: Any, *_: Any) -> None:
        if kill and (kill.rank, kill.phase) == (self.global_rank, phase) and self.global_step >= kill.step:
            threading.Timer(kill.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()

    kind.on_train_batch_end = on_train_batch_end
    for phase in PHASES:
        setattr(model, phase, partial(begin, phase, model))
    return model


def train(folder: str, mode: str, num_steps: int, kill: Kill | None) -> str:
    """A hash of this rank's weights and optimizer states at the end of the run. Collective."""
    pl = load()
    resumes = make("AutoResume", pl.__name__)(f"{folder}/checkpoints", every_n_train_steps=2)
    fitter = trainer(
        pl,
        strategy=strategy_class()(**MODES[mode][1]),
        max_steps=num_steps,
        max_epochs=-1,
        enable_checkpointing=True,
        callbacks=[resumes],
    )
    model = _model(pl, folder, kill)
    fitter.fit(model, DataLoader(dataset(40), batch_size=4, shuffle=True))
    digest = hashlib.sha256()
    states = [value for state in fitter.optimizers[0].state.values() for _, value in sorted(state.items())]
    for tensor in (*model.parameters(), *(value for value in states if isinstance(value, Tensor))):
        digest.update(local_tensor(tensor).detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


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
        assert results[rank] == whole[rank], f"{mode}: weights or states of rank {rank} differ"
    again = len(_losses(folder / "killed", 0)) - num_steps
    spread = ", ".join(f"{phase} {number}" for phase, number in sorted(counts.items()) if number)
    return f"{mode}: {killed} kills ({spread}); {again} steps run again; {time.monotonic() - begun:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    options = parser.parse_args()
    multiprocessing.set_forkserver_preload(["tests.support.preloaded"])
    print(f"--seed {options.seed}", flush=True)
    pool, done, number = ProcessPool(), 0, 0
    while done < options.kills:
        draw, kills = random.Random(f"{options.seed} {number}"), min(10, options.kills - done)
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            mode = options.modes[number % len(options.modes)]
            print(run_series(pool, Path(folder), mode, kills=kills, num_steps=3 * kills + 4, draw=draw), flush=True)
        done, number = done + kills, number + 1
    pool.close()
    print(f"{done} kills: every loss, and the weights at the end, are those of runs without")


if __name__ == "__main__":
    main()
