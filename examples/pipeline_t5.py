"""An encoder-decoder that says itself how it is cut: the blocks of a T5, each in a small module that hands on the rest.

python examples/pipeline_t5.py                               # 2 CPU processes
"""

from __future__ import annotations

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import T5Config, T5ForConditionalGeneration
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

from lightning_muon import ParallelMuonStrategy

VOCABULARY, LENGTH = 32, 12


class Embed(nn.Module):
    """Both sides at once, with one weight; the decoder's go past the encoder."""

    def __init__(self, t5: T5ForConditionalGeneration) -> None:
        super().__init__()
        self.shared = t5.shared

    def forward(self, source: Tensor, target: Tensor, padding: Tensor) -> tuple[Tensor, ...]:
        return self.shared(source), self.shared(target), padding


class EncoderBlock(nn.Module):
    """The first one makes the position bias, which the others get."""

    def __init__(self, t5: T5ForConditionalGeneration, number: int) -> None:
        super().__init__()
        self.config, self.block = t5.encoder.config, t5.encoder.block[number]
        self.norm = t5.encoder.final_layer_norm if number == len(t5.encoder.block) - 1 else None

    def forward(self, hidden: Tensor, target: Tensor, padding: Tensor, *bias: Tensor) -> tuple[Tensor, ...]:
        mask = create_bidirectional_mask(self.config, hidden, padding)
        hidden, *bias = self.block(hidden, mask, *bias)
        if self.norm is None:
            return hidden, target, padding, bias[0]
        return target, self.norm(hidden), padding


class DecoderBlock(nn.Module):
    """Reads what the encoder has returned, and hands it on."""

    def __init__(self, t5: T5ForConditionalGeneration, number: int) -> None:
        super().__init__()
        self.config, self.block = t5.decoder.config, t5.decoder.block[number]

    def forward(self, hidden: Tensor, encoded: Tensor, padding: Tensor, *bias: Tensor) -> tuple[Tensor, ...]:
        own = create_causal_mask(self.config, hidden, None, past_key_values=None)
        cross = create_bidirectional_mask(self.config, hidden, padding, encoder_hidden_states=encoded)
        hidden, *bias = self.block(hidden, own, *bias or [None], encoded, cross)
        return hidden, encoded, padding, bias[0]


class Head(nn.Module):
    """Its weight is that of the embedding: two copies, whose gradients are added."""

    def __init__(self, t5: T5ForConditionalGeneration) -> None:
        super().__init__()
        self.norm, self.lm_head, self.scale = t5.decoder.final_layer_norm, t5.lm_head, t5.model_dim**-0.5

    def forward(self, hidden: Tensor, *_: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden) * self.scale)


def make_t5(num_layers: int) -> T5ForConditionalGeneration:
    """The same weights on each rank."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=num_layers,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


class Reverser(L.LightningModule):
    """Learns to write a sequence backwards."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        t5 = make_t5(num_layers)
        encoder = [EncoderBlock(t5, number) for number in range(num_layers)]
        decoder = [DecoderBlock(t5, number) for number in range(num_layers)]
        self.parts = nn.ModuleList([Embed(t5), *encoder, *decoder, Head(t5)])

    def pipeline_parts(self) -> list[nn.Module]:
        return list(self.parts)

    def pipeline_step(self, batch: dict[str, Tensor]) -> tuple[tuple[Tensor, ...], Tensor]:
        shifted = F.pad(batch["labels"][:, :-1], (1, 0))  # What the decoder has written before.
        return (batch["input_ids"], shifted, batch["attention_mask"]), batch["labels"]

    def pipeline_loss(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor: ...  # Not called in a pipeline.

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def samples(number: int) -> list[dict[str, Tensor]]:
    """Sequences, of which the first tokens may be padding, and their reverse."""
    tokens = torch.randint(1, VOCABULARY, (number, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(LENGTH) >= torch.arange(number)[:, None] % 3
    return [
        {"input_ids": row, "attention_mask": own.long(), "labels": row.flip(0)}
        for row, own in zip(tokens, mask, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--schedule", default="1f1b")
    arguments = parser.parse_args()
    strategy = ParallelMuonStrategy(
        pipeline_size=2, pipeline_schedule=arguments.schedule, pipeline_microbatches=4, sharding="none"
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=arguments.steps,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Reverser(), DataLoader(samples(16 * arguments.steps), batch_size=16))
    trainer.print(f"loss {float(trainer.callback_metrics['train_loss']):.3f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
