"""T5 as an ordinary LightningModule; nothing in it knows of Muon, FSDP2 or the number of ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration

from lightning_muon.comm.agreement import together
from recipes.t5_summarization.data import IGNORED_LABEL, Batch
from recipes.t5_summarization.files import save_with_run, write_atomically

# https://huggingface.co/google-t5/t5-small/blob/main/config.json and t5-base: what differs from T5Config's defaults.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "t5-small": {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8, "vocab_size": 32128},
    "t5-base": {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "vocab_size": 32128},
}
_NUM_SAMPLES = 4  # Of a validation.


class Summary(NamedTuple):
    """One generated summary."""

    source: str
    target: str
    text: str


@cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer  # It takes a second, which a plain fit need not pay.

    return RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)


def rouge(summaries: Sequence[Summary]) -> dict[str, float]:
    """Mean F-measures of ROUGE-1, ROUGE-2 and ROUGE-L, in [0, 1]."""
    scores = [_scorer().score(each.target, each.text) for each in summaries]
    return {name: sum(score[name].fmeasure for score in scores) / len(scores) for name in scores[0]}


def build_t5(architecture: str | Mapping[str, Any], *, pretrained: bool) -> T5ForConditionalGeneration:
    """The network.

    Args:
        architecture: ``"t5-small"``, ``"t5-base"``, or arguments of ``transformers.T5Config``.
        pretrained: Load the weights of that name from the hub.
    """
    if not isinstance(architecture, str):
        if pretrained:
            raise ValueError(f"pretrained=True needs the name of a model on the hub, got architecture={architecture}")
        return T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, **architecture))
    if pretrained:
        # from_pretrained turns dropout off, and Lightning leaves it as it is.
        return T5ForConditionalGeneration.from_pretrained(architecture).train()
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture must be one of {sorted(ARCHITECTURES)} or a mapping, got {architecture!r}")
    return T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, **ARCHITECTURES[architecture]))


def warmup_then_linear_decay(step: int, *, warmup_steps: int, total_steps: int) -> float:
    """Factor of the learning rate: up to 1 over the warm-up, then down to 0 at the last step."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))


class T5Summarizer(LightningModule):
    """Trains T5 to write the target from the source.

    Args:
        architecture: See :func:`build_t5`.
        pretrained: Start from the weights on the hub.
        lr: Peak learning rate of AdamW.
        embedding_lr_scale: Learning rate of the token embedding as a multiple of ``lr``. T5 draws it with a standard
            deviation of 1, ten times that of its matrices, so a short training from random weights needs more than 1.
        weight_decay: Decoupled weight decay.
        warmup_share: Share of all steps for the linear warm-up.
        paper_loss: Average the loss over padding too, as the code of the FlexDeMo paper does, not over tokens only.
            The data must be padded to its maximal length for the same numbers.
        rouge_batches: Validation batches per rank whose summaries are generated and scored, the first ones.
        max_new_tokens: Of a generated summary.
        predictions: File that ``predict`` writes, one JSON object per line: source, prediction, and target if known.
    """

    def __init__(
        self,
        *,
        architecture: str | dict[str, Any] = "t5-base",
        pretrained: bool = False,
        lr: float = 1e-3,
        embedding_lr_scale: float = 1.0,
        weight_decay: float = 0.01,
        warmup_share: float = 0.05,
        paper_loss: bool = False,
        rouge_batches: int = 2,
        max_new_tokens: int = 32,
        predictions: str = "predictions.jsonl",
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = build_t5(architecture, pretrained=pretrained)
        self.summaries: list[Summary] = []
        self.samples: list[dict[str, Any]] = []  # Of all validations, the last one first.
        self.predictions: dict[int, str] = {}  # Number of a row -> summary.

    @property
    def source_prefix(self) -> str:
        """What weights of the hub have learned to read in front of a text to be summarized; of T5 ``"summarize: "``."""
        tasks = getattr(self.model.config, "task_specific_params", None) or {}
        return tasks.get("summarization", {}).get("prefix", "") if self.hparams.pretrained else ""

    def _loss(self, batch: Batch) -> tuple[Tensor, int]:
        """Mean loss and the number of positions that it is the mean of."""
        labels = batch["labels"]
        if self.hparams.paper_loss:
            labels = labels.masked_fill(labels == IGNORED_LABEL, self.model.config.pad_token_id)
        output = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels)
        return output.loss, int((labels != IGNORED_LABEL).sum())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss of one batch."""
        loss, num_positions = self._loss(batch)
        self.log(
            "train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=num_positions, sync_dist=True
        )
        return loss

    def on_train_start(self) -> None:
        """Keep the tokenizer with the run."""
        save_with_run(self.trainer, self.trainer.datamodule.tokenizer, "tokenizer")

    def on_validation_epoch_start(self) -> None:
        """Forget the summaries of the last epoch."""
        self.summaries = []

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the mean over all tokens of all ranks, and ROUGE on the first batches."""
        loss, num_positions = self._loss(batch)
        self.log("val_loss", loss, prog_bar=True, batch_size=num_positions, sync_dist=True)
        if batch_idx < self.hparams.rouge_batches and not self.trainer.sanity_checking:
            summaries = self._summarize(batch)
            self.log_dict(rouge(summaries), batch_size=len(summaries), sync_dist=True)
            self.summaries += summaries

    def on_validation_epoch_end(self) -> None:
        """Write the first summaries to ``samples.json``."""
        if not self.summaries or not self.trainer.is_global_zero:
            return
        first = [{"step": self.trainer.global_step, **each._asdict()} for each in self.summaries[:_NUM_SAMPLES]]
        self.samples = first + self.samples
        if folder := getattr(self.trainer.logger, "log_dir", None):
            write_atomically(Path(folder, "samples.json"), json.dumps(self.samples))

    def on_predict_epoch_start(self) -> None:
        """Begin anew."""
        self.predictions = {}

    def predict_step(self, batch: tuple[list[int], Batch], batch_idx: int) -> list[str]:
        """Summaries of a batch, kept by the numbers of its rows."""
        numbers, inputs = batch
        texts = self._generate(inputs)
        self.predictions.update(zip(numbers, texts, strict=True))
        return texts

    def on_predict_epoch_end(self) -> None:
        """Write each row once, in the order of the data. Collective over all ranks; every rank must call it."""
        found = [self.predictions]
        if dist.is_initialized():
            found = [{} for _ in range(dist.get_world_size())]
            dist.all_gather_object(found, self.predictions)
        together(lambda: self._write(found) if self.trainer.is_global_zero else None)

    def _write(self, found: Sequence[Mapping[int, str]]) -> None:
        texts = {number: text for each in found for number, text in each.items()}  # Some rows were given to two ranks.
        lines = list[str]()
        for number, text in sorted(texts.items()):
            row = self.trainer.datamodule.rows_to_predict[number]
            line = {"source": row.source, "prediction": text} | ({"target": row.target} if row.target else {})
            lines.append(json.dumps(line, ensure_ascii=False))
        write_atomically(Path(self.hparams.predictions), "\n".join([*lines, ""]))

    def _generate(self, batch: Batch) -> list[str]:
        """Greedy summaries. Collective over all ranks when the weights are sharded; every rank must call it."""
        ids = self.model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=self.hparams.max_new_tokens,
            do_sample=False,
            # A rank that is done goes on until all are, because each step gathers the shards of the weights.
            synced_gpus=self.trainer.world_size > 1,
        )
        return self._decode(ids)

    def _decode(self, ids: Tensor) -> list[str]:
        tokenizer = self.trainer.datamodule.tokenizer
        return [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]

    def _summarize(self, batch: Batch) -> list[Summary]:
        """Summaries beside what they were made from; collective as :meth:`_generate` is."""
        labels = batch["labels"].masked_fill(batch["labels"] == IGNORED_LABEL, self.model.config.pad_token_id)
        columns = self._decode(batch["input_ids"]), self._decode(labels), self._generate(batch)
        return [Summary(*texts) for texts in zip(*columns, strict=True)]

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW for everything; the strategy moves the matrices to Muon at the same learning rate."""
        lr, config = self.hparams.lr, self.model.config
        embeddings, others = [], []
        for parameter in self.parameters():
            (embeddings if parameter.shape == (config.vocab_size, config.d_model) else others).append(parameter)
        groups = [{"params": others}, {"params": embeddings, "lr": lr * self.hparams.embedding_lr_scale}]
        optimizer = torch.optim.AdamW(groups, lr=lr, weight_decay=self.hparams.weight_decay)
        total_steps = int(self.trainer.estimated_stepping_batches)
        warmup_steps = max(1, round(self.hparams.warmup_share * total_steps))
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: warmup_then_linear_decay(step, warmup_steps=warmup_steps, total_steps=total_steps),
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
