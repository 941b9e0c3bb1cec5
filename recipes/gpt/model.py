"""GPT-2, Llama or Qwen3-MoE from random weights, as an ordinary LightningModule with AdamW."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from transformers import (
    DistributedConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    get_cosine_with_min_lr_schedule_with_warmup,
)

from recipes.gpt.data import Batch
from recipes.t5_summarization.files import save_with_run

PROMPT_TOKENS = 16
Architecture = Literal["gpt2", "llama", "qwen3_moe"]


def build(
    architecture: Architecture,
    *,
    vocab_size: int,
    context_size: int,
    width: int,
    layers: int,
    heads: int,
    experts: int = 8,
) -> GPT2LMHeadModel | LlamaForCausalLM | Qwen3MoeForCausalLM:
    """The network; ``width`` is a multiple of ``heads``. But for experts, embeddings are also the output layer."""
    common: dict[str, Any] = {"vocab_size": vocab_size, "bos_token_id": 0, "eos_token_id": 0}
    if architecture == "gpt2":
        sizes = {"n_positions": context_size, "n_embd": width, "n_layer": layers, "n_head": heads}
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return GPT2LMHeadModel(GPT2Config(**common, **sizes, **dropout))
    common |= {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    # As many weights as the 4 * width of GPT-2, in three matrices; a multiple of 32.
    common |= {"max_position_embeddings": context_size, "intermediate_size": 32 * round(width * 8 / 3 / 32)}
    if architecture == "llama":
        return LlamaForCausalLM(LlamaConfig(**common, tie_word_embeddings=True))
    common |= {"num_key_value_heads": heads, "head_dim": width // heads, "num_experts": experts}
    common |= {"num_experts_per_tok": 2, "moe_intermediate_size": common["intermediate_size"] // 2}
    # The loss has a term for experts that get too many tokens.
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, output_router_logits=True))


def make_optimizer(
    model: torch.nn.Module, *, lr: float, weight_decay: float, warmup_share: float, num_steps: int
) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW, and a rate that rises over ``warmup_share`` of the steps and falls to a tenth along a cosine."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay)
    num_warmup = max(1, round(warmup_share * num_steps))
    return optimizer, get_cosine_with_min_lr_schedule_with_warmup(optimizer, num_warmup, num_steps, min_lr_rate=0.1)


class GPT(LightningModule):
    """Predicts the next token. Losses are means over tokens, in nats.

    Args:
        architecture: See :func:`build`, also for the sizes.
        vocab_size: At least that of the data's tokenizer.
        context_size: At least that of the data.
        width: Of the residual stream.
        layers: Transformer blocks.
        heads: Of each block.
        experts: Of each block of ``qwen3_moe``, of which a token meets two.
        ep_size: Ranks that divide the experts of a block; the ranks are a multiple.
        lr: Peak learning rate of AdamW.
        weight_decay: Decoupled.
        warmup_share: Share of all steps for the linear warm-up.
        sample_tokens: Length of the sample at the end of each validation; 0 for none.
    """

    def __init__(
        self,
        *,
        architecture: Architecture = "llama",
        vocab_size: int = 4096,
        context_size: int = 256,
        width: int = 256,
        layers: int = 4,
        heads: int = 4,
        experts: int = 8,
        ep_size: int = 1,
        lr: float = 3e-3,
        weight_decay: float = 0.1,
        warmup_share: float = 0.05,
        sample_tokens: int = 48,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        sizes = {"width": width, "layers": layers, "heads": heads, "experts": experts}
        self.gpt = build(architecture, vocab_size=vocab_size, context_size=context_size, **sizes)
        self.samples: list[dict[str, Any]] = []

    def configure_model(self) -> None:
        """Let transformers divide the experts over the ranks; it does so while it loads weights."""
        trainer = self._trainer  # Without one, as in load_from_checkpoint, all experts are here.
        if trainer is None or self.hparams.ep_size == 1 or hasattr(self.gpt.config, "distributed_config"):
            return
        folder = Path(trainer.default_root_dir, "outputs", "first-weights")
        if trainer.is_global_zero:
            self.gpt.save_pretrained(folder)  # Which all nodes must see.
        trainer.strategy.barrier()
        sizes = {"fsdp_size": trainer.world_size, "ep_size": self.hparams.ep_size}
        divided = DistributedConfig(**sizes, ep_implementation="all_to_all")
        self.gpt = type(self.gpt).from_pretrained(folder, distributed_config=divided).train()

    def on_fit_start(self) -> None:
        """The model has room for the tokens of the data."""
        data = self.trainer.datamodule
        for name, needed in {"vocab_size": len(data.tokenizer), "context_size": data.hparams.context_size}.items():
            if needed > self.hparams[name]:
                raise ValueError(f"model.{name} is {self.hparams[name]}, but the data needs {needed}; raise it")

    def on_train_start(self) -> None:
        """Keep the tokenizer with the run."""
        save_with_run(self.trainer, self.trainer.datamodule.tokenizer, "tokenizer")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss of one batch. A pipeline computes and logs the same itself."""
        loss = self.gpt(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """The mean over all windows of all ranks."""
        loss = self.gpt(**batch).loss
        self.log("val_loss", loss, prog_bar=True, batch_size=len(batch["labels"]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        """Continue the beginning of the held-out text; printed, and kept in ``samples.json``."""
        if not self.hparams.sample_tokens or self.trainer.sanity_checking:
            return
        sample, folder = self.sample(), self.trainer.log_dir
        self.samples.append({"step": self.global_step, **sample})
        self.print(f"\nstep {self.global_step}: {sample['prompt']!r} -> {sample['text']!r}")
        if folder and self.trainer.is_global_zero:
            path = Path(folder, "samples.json")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.samples[::-1]))

    def sample(self) -> dict[str, str]:
        """What follows the first held-out tokens, by the model. Collective: the weights are sharded."""
        data = self.trainer.datamodule
        num_tokens = min(PROMPT_TOKENS, data.hparams.context_size // 2)
        prompt = data.validation[0]["input_ids"][None, :num_tokens].to(self.device)
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(0)  # The stages of a pipeline must draw the same tokens.
            tokens = self.gpt.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=True,
                top_k=50,
                max_new_tokens=min(self.hparams.sample_tokens, self.hparams.context_size - num_tokens),
                pad_token_id=0,
                synced_gpus=self.trainer.world_size > 1,
            )[0]
        texts = (data.tokenizer.decode(part) for part in (tokens[:num_tokens], tokens[num_tokens:]))
        return dict(zip(("prompt", "text"), texts, strict=True))

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW for everything; the strategy moves the matrices to Muon."""
        names = ("lr", "weight_decay", "warmup_share")
        optimizer, scheduler = make_optimizer(
            self,
            **{name: self.hparams[name] for name in names},
            num_steps=int(self.trainer.estimated_stepping_batches),
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
