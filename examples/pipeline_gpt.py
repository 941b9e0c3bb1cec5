"""A GPT-2 over two pipeline stages, each sharded over two ranks: one option of the strategy.

python examples/pipeline_gpt.py                              # 4 CPU processes
python examples/pipeline_gpt.py --schedule zb_v --shard-size 1
"""

from __future__ import annotations

import argparse

import lightning as L
import torch
from pipeline_data import Text, complete, model
from torch.utils.data import DataLoader

from lightning_muon import ParallelMuonStrategy


class Gpt(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.gpt = model()

    def training_step(self, batch, batch_idx):
        """What runs without a pipeline; with one, the strategy splits the batch and logs the same ``train_loss``."""
        loss = self.gpt(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.gpt(**batch).loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--shard-size", type=int, default=2)
    arguments = parser.parse_args()
    strategy = ParallelMuonStrategy(
        pipeline_size=2,
        pipeline_schedule=arguments.schedule,
        pipeline_microbatches=4,
        shard_size=arguments.shard_size,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2 * arguments.shard_size,
        strategy=strategy,
        max_steps=arguments.steps,
        val_check_interval=arguments.steps,
        check_val_every_n_epoch=None,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    module = Gpt()
    trainer.fit(
        module,
        DataLoader(Text(16 * arguments.steps), batch_size=8),
        DataLoader(Text(64, is_validation=True), batch_size=16),
    )
    module.eval()
    text = complete(module.gpt, "The statement ")
    trainer.print(f"validation loss {float(trainer.callback_metrics['val_loss']):.3f}; {text!r}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
