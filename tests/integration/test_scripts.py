"""A program as users write it, started as users start it: Lightning launches the other processes."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.support.programs import program_environment, run_program
from tests.support.warm_python import warm_python

# Arguments: the strategy, and a checkpoint to go on from.
_SCRIPT = """
import sys

import lightning.pytorch as pl
import lightning_muon
import torch
from torch import nn
import torch.nn.functional as F


class Classifier(pl.LightningModule):
    def __init__(self, width: int = 16):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Embedding(11, width), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 11))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self):
        if len(sys.argv) == 2:
            return torch.optim.AdamW(self.parameters(), lr=3e-2)
        optimizer = lightning_muon.ParallelMuon(self.parameters(), lr=3e-2)
        optimizer.attach(self)
        return optimizer


if __name__ == "__main__":
    strategy, *resumed = sys.argv[1:]
    pl.seed_everything(1)
    x = torch.arange(176) % 11
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x + 1) % 11), batch_size=4)
    if strategy != "auto":
        strategy = lightning_muon.ParallelMuonStrategy(save_distributed_checkpoint=False)
    options = {"devices": 1 if resumed else 2, "max_epochs": 5 if resumed else 4, "logger": False}
    trainer = pl.Trainer(accelerator="cpu", strategy=strategy, enable_checkpointing=False, **options)
    trainer.fit(Classifier(), data, data, ckpt_path=resumed[0] if resumed else None, weights_only=False)
    steps = {int(state["step"]) for state in trainer.optimizers[0].state.values() if "step" in state}
    trainer.save_checkpoint("resumed.ckpt" if resumed else "model.ckpt")
    val = trainer.callback_metrics["val"]
    # In one piece: several processes write.
    sys.stdout.write(f"world {trainer.world_size} val {val} {steps} {trainer.global_step}\\n")
"""


def test_the_strategy_is_the_only_change_and_can_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    options = {"cwd": tmp_path, "env": program_environment(), "capture_output": True, "text": True, "timeout": 120.0}
    done = subprocess.run([warm_python(), "train.py", "parallel_muon"], check=False, **options)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    losses = [float(loss) for loss in re.findall(r"world 2 val ([\d.e-]+)", text)]
    assert len(losses) == 2
    assert max(losses) < 0.5, "an untrained model has log(11) = 2.4"
    assert text.count("AdamW -> ParallelMuon for matrices with 3 times its learning rate") == 1, "rank 0 alone reports"
    namespace: dict[str, object] = {"__name__": "train"}
    exec(_SCRIPT, namespace)
    module = namespace["Classifier"].load_from_checkpoint(tmp_path / "model.ckpt")  # type: ignore[attr-defined]
    x = torch.arange(176) % 11
    loss = torch.nn.functional.cross_entropy(module.layers(x), (x + 1) % 11)
    assert loss.item() == pytest.approx(losses[0], abs=1e-5)
    # 4 epochs of 22 steps on two ranks, one of 44 on one.
    assert "{132} 132" in run_program(tmp_path / "train.py", "auto", "model.ckpt", directory=tmp_path)
