"""A causal language model of transformers as a LightningModule with AdamW; nothing in it knows of shards or Muon."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from lightning_muon import full_state_dict
from recipes.t5_summarization.data import IGNORED_LABEL, Batch
from recipes.t5_summarization.files import save_with_run
from recipes.t5_summarization.model import warmup_then_linear_decay


def build_model(model_name: str, lora: Mapping[str, Any] | None, dtype: str = "float32") -> nn.Module:
    """The pretrained model, ready to train; see :class:`FineTuned`. Factors of LoRA are float32 in any case."""
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=getattr(torch, dtype))
    if lora is not None:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **lora))
    return model.train()  # from_pretrained has turned dropout off.


def require_room(model: Any, highest_token: int) -> None:
    """``ValueError`` if the input embedding has no row for the highest token of the data."""
    num_rows = model.get_input_embeddings().weight.shape[0]
    if highest_token >= num_rows:
        raise ValueError(
            f"the tokenizer has made tokens up to {highest_token}, but the input embedding of the model has {num_rows} "
            "rows; take the tokenizer of the model"
        )


def loss_sum(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The summed loss of the completions of a batch, and the number of their tokens."""
    num_tokens = (batch["labels"][:, 1:] != IGNORED_LABEL).sum()  # The first token is predicted from nothing.
    return model(**batch).loss * num_tokens, num_tokens


def export(model: Any, weights: Mapping[str, Tensor], tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write what ``from_pretrained`` reads, on one rank, from the whole ``weights`` of a model that may have shards.

    All weights, or for LoRA the adapters, and in ``folder / "merged"`` the base with the adapters added.
    """
    model.save_pretrained(folder, state_dict=dict(weights))
    tokenizer.save_pretrained(folder)
    if hasattr(model, "peft_config"):
        import peft

        merged = peft.AutoPeftModelForCausalLM.from_pretrained(folder).merge_and_unload()
        merged.save_pretrained(folder / "merged")
        tokenizer.save_pretrained(folder / "merged")


class FineTuned(LightningModule):
    """Goes on training a pretrained model.

    Args:
        model_name: Name on the hub, or folder.
        lora: Arguments of ``peft.LoraConfig``, such as ``{"r": 16}``; ``None`` trains all weights.
        dtype: Of the weights.
        lr: Peak learning rate of AdamW.
        weight_decay: Decoupled weight decay.
        warmup_share: Share of all steps for the linear warm-up; then the rate falls linearly to 0.
        output: Folder for :func:`export` at the end of the training; empty: none.
    """

    def __init__(
        self,
        *,
        model_name: str,
        lora: dict[str, Any] | None = None,
        dtype: str = "float32",
        lr: float = 1e-5,
        weight_decay: float = 0.0,
        warmup_share: float = 0.03,
        output: str = "",
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = build_model(model_name, lora, dtype)

    def setup(self, stage: str) -> None:
        """Compare the embedding with the tokens of the data, on every rank."""
        require_room(self.model, self.trainer.datamodule.highest_token)

    def on_train_start(self) -> None:
        """Keep the tokenizer with the run."""
        save_with_run(self.trainer, self.trainer.datamodule.tokenizer, "tokenizer")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The mean over the tokens, or their sum where the strategy divides by the tokens of all ranks."""
        loss, num_tokens = loss_sum(self.model, batch)
        self.log("train_loss", loss / num_tokens, prog_bar=True)
        strategy: Any = self.trainer.strategy
        if getattr(getattr(strategy, "options", None), "loss_scaling", "mean") != "tokens":
            return loss / num_tokens
        strategy.report_tokens(num_tokens)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Mean over the tokens of all ranks."""
        loss, num_tokens = loss_sum(self.model, batch)
        self.log("val_loss", loss / num_tokens, prog_bar=True, batch_size=int(num_tokens), sync_dist=True)

    def on_train_end(self) -> None:
        """Export. Collective over all ranks."""
        if self.hparams.output:
            weights = full_state_dict(self.model)
            if self.trainer.is_global_zero:
                export(self.model, weights, self.trainer.datamodule.tokenizer, Path(self.hparams.output))
            self.trainer.strategy.barrier()

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW for what is trained; the strategy may move its matrices to Muon."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.hparams.lr, weight_decay=self.hparams.weight_decay)
        total = int(self.trainer.estimated_stepping_batches)
        warmup = max(1, round(self.hparams.warmup_share * total))
        factor = partial(warmup_then_linear_decay, warmup_steps=warmup, total_steps=total)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
