"""The Trainer run of ``make gpu``: one rank with FSDP2, compared with a loop of plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_muon import MuonConfig, ParallelMuon, ParallelMuonStrategy, full_state_dict
from lightning_muon.sharding.modes import Sharding

WORDS, WIDTH, EPOCHS = 101, 64, 2


class Model(L.LightningModule):
    """Predicts its own input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)]
        layers = [layer for block in blocks for layer in block]
        self.network = nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers, nn.Linear(WIDTH, WORDS))

    def training_step(self, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.network(tokens).flatten(0, 1), tokens.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def compare_with_loop(sharding: Sharding, device: str, folder: Path) -> dict[str, Any]:
    """Train with a Trainer, resumed after an epoch and not, and with a loop of the same steps."""
    batches = torch.randint(WORDS, (3, 4, 16), generator=torch.Generator().manual_seed(1))
    trained = _fit(sharding, device, folder, batches)
    _fit(sharding, device, folder, batches, epochs=EPOCHS // 2)
    resumed = _fit(sharding, device, folder, batches, resume=str(folder / "middle.ckpt"))
    model = Model().to(device)
    optimizer = ParallelMuon(model, lr=1e-2, weight_decay=1e-2, compute_dtype="float32", wire_dtype="float32")
    for tokens in [*batches] * EPOCHS:
        optimizer.zero_grad()
        model.training_step(tokens.to(device)).backward()
        optimizer.step()
    found = [(trained[name] - value.detach().cpu()).abs().max() for name, value in model.state_dict().items()]
    return {
        "backend": dist.get_backend(),
        "difference": torch.stack(found).max().item(),
        "resumes": all(torch.equal(trained[name], resumed[name]) for name in trained),
    }


def _fit(
    sharding: Sharding, device: str, folder: Path, batches: Tensor, *, epochs: int = EPOCHS, resume: str | None = None
) -> dict[str, Tensor]:
    # The factor of the loop, not the one that replaces AdamW's learning rate.
    config = MuonConfig(compute_dtype="float32", wire_dtype="float32", muon_lr_factor=1.0)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        strategy=ParallelMuonStrategy(optimizer=config, sharding=sharding),
        max_epochs=epochs,
        default_root_dir=folder,
        use_distributed_sampler=False,
        **quiet,
    )
    model = Model()
    loader: DataLoader[Tensor] = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    trainer.fit(model, loader, ckpt_path=resume, weights_only=False)
    if epochs < EPOCHS:
        trainer.save_checkpoint(folder / "middle.ckpt")
    return {name: value.detach().cpu() for name, value in full_state_dict(model).items()}
