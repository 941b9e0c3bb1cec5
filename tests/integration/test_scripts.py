"""Programs as users write them, started as users start them: Lightning launches the other processes."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.integration.training import PACKAGES
from tests.support.programs import program_environment, run_program
from tests.support.warm_python import warm_python

_SCRIPT = """
import sys

import lightning_muon
import {package} as pl
import torch
from torch import nn
import torch.nn.functional as F


class Classifier(pl.LightningModule):
    def __init__(self, width: int = 16):
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(11, width)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, 11)

    def forward(self, x):
        return self.head(torch.tanh(self.hidden(self.embedding(x))))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-2)


if __name__ == "__main__":
    pl.seed_everything(1)
    x = torch.arange(176) % 11
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x + 1) % 11), batch_size=4)
    model = Classifier()
    trainer = pl.Trainer(accelerator="cpu", devices={devices}, strategy={strategy}, max_epochs=4, logger=False)
    trainer.fit(model, data, data)
    val = trainer.validate(model, data, verbose=False)[0]["val"]
    trainer.save_checkpoint("model.ckpt")
    sys.stdout.write(f"world {{trainer.world_size}} val {{val}}\\n")  # In one piece: several processes write.
"""


_RESUME = """
import lightning_muon
import lightning.pytorch as pl
import torch
from train import Classifier


class Muon(Classifier):
    def configure_optimizers(self):
        optimizer = lightning_muon.ParallelMuon(self.parameters(), lr=3e-2)
        optimizer.attach(self)
        return optimizer


if __name__ == "__main__":
    x = torch.arange(176) % 11
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x + 1) % 11), batch_size=4)
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=5, logger=False, enable_checkpointing=False)
    trainer.fit(Muon(), data, data, ckpt_path="model.ckpt", weights_only=False)
    optimizer = trainer.optimizers[0]
    print("steps", {int(state["step"]) for state in optimizer.state.values() if "step" in state}, trainer.global_step)
"""


def test_the_strategy_is_the_only_change_and_can_be_left_out(tmp_path: Path) -> None:
    strategy = "lightning_muon.ParallelMuonStrategy(save_distributed_checkpoint=False)"
    (tmp_path / "train.py").write_text(_SCRIPT.format(package=PACKAGES[0], devices=2, strategy=strategy))
    options = {"cwd": tmp_path, "env": program_environment(), "capture_output": True, "text": True, "timeout": 120.0}
    done = subprocess.run([warm_python(), "train.py"], check=False, **options)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    losses = [float(loss) for loss in re.findall(r"world 2 val ([\d.e-]+)", text)]
    assert len(losses) == 2
    assert max(losses) < 0.5, "an untrained model has log(11) = 2.4"
    assert text.count("AdamW -> ParallelMuon for matrices with 3 times its learning rate") == 1, "rank 0 alone reports"
    namespace: dict[str, object] = {"__name__": "train"}
    exec(_SCRIPT.format(package=PACKAGES[0], devices=1, strategy="'auto'"), namespace)
    module = namespace["Classifier"].load_from_checkpoint(tmp_path / "model.ckpt")  # type: ignore[attr-defined]
    x = torch.arange(176) % 11
    loss = torch.nn.functional.cross_entropy(module(x), (x + 1) % 11)
    assert loss.item() == pytest.approx(losses[0], abs=1e-5)
    (tmp_path / "resume.py").write_text(_RESUME)
    # 4 epochs of 22 steps on two ranks, one of 44 on one.
    assert "steps {132} 132" in run_program(tmp_path / "resume.py", directory=tmp_path)
