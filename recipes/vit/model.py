"""A ViT from random weights as a LightningModule with AdamW; nothing in it knows of shards or Muon."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

from recipes.t5_summarization.files import save_with_run
from recipes.t5_summarization.model import warmup_then_linear_decay
from recipes.vit.data import Batch, image_processor


class ViTClassifier(LightningModule):
    """Says which class an image belongs to.

    Args:
        num_classes: Of the data.
        architecture: Arguments of ``transformers.ViTConfig``.
        lr: Peak learning rate of AdamW.
        weight_decay: Decoupled weight decay.
        warmup_share: Share of all steps for the linear warm-up; then the rate falls linearly to 0.
        label_smoothing: As in ``torch.nn.functional.cross_entropy``, in training.
    """

    def __init__(
        self,
        *,
        num_classes: int,
        architecture: dict[str, Any],
        lr: float = 1e-3,
        weight_decay: float = 0.05,
        warmup_share: float = 0.05,
        label_smoothing: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = ViTForImageClassification(ViTConfig(num_labels=num_classes, **architecture))

    def setup(self, stage: str) -> None:
        """The names of the classes are those of the data; compares their number, on every rank."""
        classes = self.trainer.datamodule.classes
        if len(classes) != self.hparams.num_classes:
            raise ValueError(
                f"num_classes={self.hparams.num_classes}, but the data has {len(classes)} classes: {classes}"
            )
        config = self.model.config
        config.id2label, config.label2id = dict(enumerate(classes)), {name: n for n, name in enumerate(classes)}

    def on_train_start(self) -> None:
        """Keep the image processor, and the config with the names of the classes, with the run."""
        save_with_run(self.trainer, image_processor(self.trainer.datamodule.hparams.image_size), "")
        save_with_run(self.trainer, self.model.config, "")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean loss over the images."""
        logits = self.model(pixel_values=batch["pixel_values"]).logits
        loss = F.cross_entropy(logits, batch["labels"], label_smoothing=self.hparams.label_smoothing)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Means over the images of all ranks."""
        labels = batch["labels"]
        logits = self.model(pixel_values=batch["pixel_values"]).logits
        scores = {
            "val_loss": F.cross_entropy(logits, labels),
            "val_accuracy": (logits.argmax(-1) == labels).float().mean(),
        }
        self.log_dict(scores, batch_size=len(labels), sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW for everything; the strategy moves the matrices to Muon."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=self.hparams.weight_decay)
        total = int(self.trainer.estimated_stepping_batches)
        warmup = max(1, round(self.hparams.warmup_share * total))
        factor = partial(warmup_then_linear_decay, warmup_steps=warmup, total_steps=total)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
