"""Ray Train with a worker that fails: two workers on one machine, and a run that goes on by itself.

    pip install "lightning-muon[lightning] @ git+https://github.com/lightning-muon/lightning-muon" "ray[train]"
    python examples/ray_train.py                    # 12 steps
    python examples/ray_train.py --kill-at 6        # worker 1 is killed in step 6, once

The strategy is told of Ray's processes by a plugin and two attributes, in place of Ray's `prepare_trainer`, which knows
its own strategies only. Nodes must have equal numbers of workers (`placement_strategy` of ScalingConfig), and see the
folder of AutoResume, which goes on from the newest valid checkpoint in it, with another number of workers, too.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def train(options: dict[str, Any]) -> None:
    """What each worker runs, and runs again when one has failed."""
    from lightning.pytorch import LightningModule, Trainer
    from ray.train import get_context
    from ray.train.lightning import RayLightningEnvironment
    from ray.train.torch import get_device

    from lightning_muon import AutoResume

    class Denoiser(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 8))

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            killed = Path(options["folder"]) / "killed"
            if self.global_step == options["kill_at"] and self.global_rank == 1 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            loss = self.net(batch[0]).square().mean()
            with (Path(options["folder"]) / f"losses_{self.global_rank}").open("a") as file:
                file.write(f"step {self.global_step}: {loss.item()!r}\n")
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    trainer = Trainer(
        accelerator="cpu",
        devices="auto",
        strategy="parallel_muon",
        plugins=[RayLightningEnvironment()],
        max_steps=options["steps"],
        logger=False,
        enable_progress_bar=False,
        callbacks=[AutoResume(Path(options["folder"]) / "checkpoints", every_n_train_steps=4)],
    )
    num_workers, on_this_node = get_context().get_world_size(), get_context().get_local_world_size()
    trainer.strategy.parallel_devices = [get_device()] * on_this_node
    trainer.strategy.num_nodes = num_workers // on_this_node
    rows = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    trainer.fit(Denoiser(), DataLoader(TensorDataset(rows), batch_size=4, shuffle=True))


def main() -> None:
    """Start Ray on this machine, and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="ray_outputs", help="which all nodes can read and write")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kill-at", type=int, default=-1, help="the step in which worker 1 is killed")
    options = vars(parser.parse_args())
    options["folder"] = str(Path(options["folder"]).resolve())
    Path(options["folder"]).mkdir(parents=True, exist_ok=True)
    TorchTrainer(
        train,
        train_loop_config=options,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=f"{options['folder']}/ray", failure_config=FailureConfig(max_failures=2)),
    ).fit()


if __name__ == "__main__":
    main()
