"""Counts the files that a newcomer has to open: which of the package run in a step, a plan, a set-up and a save.

``python -m scripts.walks`` trains a small model on 2 CPU processes, prints for each walk the files of the package that
ran on rank 0, and the calls of its functions, and fails above :data:`MOST`. With ``--files`` also the files by name.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

# Walk -> the most files, and the most calls if they are counted.
MOST: dict[str, tuple[int, int | None]] = {
    "a step of fsdp": (11, 350),
    "a step of zero2, with backward": (15, None),
    "a plan": (14, None),
    "strategy.setup": (27, None),
    "a save": (17, None),
}
PACKAGE = str(Path(__file__).resolve().parent.parent / "lightning_muon") + os.sep


class Walk:
    """The calls of functions of the package while :meth:`follow` is active."""

    def __init__(self) -> None:
        self.files: dict[str, int] = {}

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        # What a comprehension or a class body runs is part of the function around it.
        if event == "call" and path.startswith(PACKAGE) and not frame.f_code.co_name.startswith("<"):
            name = path.removeprefix(PACKAGE)
            self.files[name] = self.files.get(name, 0) + 1

    @contextmanager
    def follow(self) -> Generator[None]:
        """Context whose calls are counted, also if it is entered several times."""
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None)


def model() -> nn.Module:
    """A small model with four square matrices and 11 parameters."""
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    return nn.Sequential(nn.Embedding(100, 64), *blocks, nn.Linear(64, 100))


def loss_of(module: Any) -> Tensor:
    """The loss of a random batch."""
    tokens = torch.randint(100, (4, 8))
    return nn.functional.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten())


def walks_of_steps() -> dict[str, Walk]:
    """Follow steps in plain loops."""
    from lightning_muon import ModeOptions, ParallelMuon, make_mode

    class Followed(ParallelMuon):
        def _make_plan(self) -> Any:
            with found["a plan"].follow():
                return super()._make_plan()

    found = {"a step of fsdp": Walk(), "a step of zero2, with backward": Walk(), "a plan": Walk()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    for name, kind, walk in zip(("fsdp", "zero2"), (Followed, ParallelMuon), found.values(), strict=False):
        module = model()
        mode = make_mode(name, mesh, ModeOptions())
        mode.prepare(module)
        optimizer = kind(module, lr=1e-3)
        mode.attach(module, [optimizer])
        for step in range(4):
            loss = loss_of(module)
            with walk.follow() if step == 3 and name == "zero2" else nullcontext():
                loss.backward()
                mode.finish_gradients()
            with walk.follow() if step == 3 else nullcontext():
                optimizer.step()
            optimizer.zero_grad()
    return found


def walks_of_trainer(folder: str) -> dict[str, Walk]:
    """Follow the set-up of Lightning's strategy, and a save."""
    import lightning as L

    from lightning_muon import ParallelMuonStrategy

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch).flatten(0, 1), batch.flatten())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Followed(ParallelMuonStrategy):
        def setup(self, trainer: Any) -> None:
            with found["strategy.setup"].follow():
                super().setup(trainer)

    found = {"strategy.setup": Walk(), "a save": Walk()}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=Followed(save_distributed_checkpoint=True),
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(torch.randint(100, (32, 8)), batch_size=4))  # type: ignore[arg-type]
    with found["a save"].follow():
        trainer.save_checkpoint(Path(folder) / "checkpoint")
    return found


def of_a_rank(folder: str) -> int:
    """Walk on this rank; 1 if a walk is longer than it may be."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = walks_of_steps() | walks_of_trainer(folder)
    too_long = 0
    for name, (most_files, most_calls) in MOST.items():
        files, calls = len(found[name].files), sum(found[name].files.values())
        too_long += files > most_files or (most_calls is not None and calls > most_calls)
        if dist.get_rank() == 0:
            of_calls = "" if most_calls is None else f" (at most {most_calls})"
            print(f"{name}: {files} files (at most {most_files}), {calls} calls{of_calls}")
            if "--files" in sys.argv:
                print("   ", ", ".join(f"{file} {number}" for file, number in found[name].files.items()))
    dist.barrier()
    return 1 if too_long else 0


def main() -> int:
    """Start the ranks, or be one of them."""
    if "RANK" in os.environ:
        return of_a_rank(os.environ["WALKS_FOLDER"])
    with tempfile.TemporaryDirectory() as folder:
        ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        environment = os.environ | {"WALKS_FOLDER": folder, "OMP_NUM_THREADS": "1"}
        return subprocess.run([*ranks, "-m", "scripts.walks", *sys.argv[1:]], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
