"""A transformer over characters, as an ordinary LightningModule with AdamW."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from recipes.vowels.data import VOCABULARY, VOWELS, Batch, hide, sentence_of


class VowelFiller(LightningModule):
    """Says for each character which vowel is hidden there.

    Args:
        width: Of the residual stream.
        num_layers: Transformer blocks.
        lr: Peak learning rate of AdamW: linear warm-up over the first twentieth of the steps, then linear decay.
        weight_decay: Decoupled.
    """

    def __init__(self, *, width: int = 128, num_layers: int = 2, lr: float = 3e-3, weight_decay: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(VOCABULARY, width)
        # It tells neighbours apart, in the place of position embeddings.
        self.neighbours = nn.Conv1d(width, width, 7, padding=3)
        block = nn.TransformerEncoderLayer(
            width, 4, 3 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, num_layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(VOWELS))
        self.training_seconds = 0.0
        # (hidden, filled, right) of the first batch of the last validation.
        self.examples: list[tuple[str, str, str]] = []

    def forward(self, characters: Tensor) -> Tensor:
        """Logits, (sentences, characters, vowels)."""
        hidden = self.embedding(characters)
        hidden = hidden + self.neighbours(hidden.transpose(1, 2)).transpose(1, 2)
        return self.head(self.norm(self.blocks(hidden, src_key_padding_mask=characters == 0)))

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Start the clock of this step."""
        self._start = time.perf_counter()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean loss over the hidden letters."""
        loss = F.cross_entropy(self(batch["characters"]).flatten(0, 1), batch["vowels"].flatten())
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Count forward, backward and optimizer step; not the validation."""
        self.training_seconds += time.perf_counter() - self._start

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Mean over the hidden letters of all ranks."""
        logits, vowels = self(batch["characters"]), batch["vowels"]
        is_hidden = vowels >= 0
        if batch_idx == 0:
            rows = zip(batch["characters"], logits.argmax(-1), vowels, strict=True)
            texts = [(sentence_of(row, filled), sentence_of(row, right)) for row, filled, right in rows]
            self.examples = [(hide(right), filled, right) for filled, right in texts]
        right = (logits.argmax(-1) == vowels)[is_hidden].float().mean()
        loss = F.cross_entropy(logits.flatten(0, 1), vowels.flatten())
        scores = {"val_loss": loss, "val_accuracy": right}
        self.log_dict(scores, batch_size=int(is_hidden.sum()), sync_dist=True, prog_bar=True)
        self.log("seconds", self.training_seconds, sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW for everything; the strategy moves the matrices to Muon."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=self.hparams.weight_decay)
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / max(1, total // 20), max(0.0, 1 - step / total))
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
