"""The first run on GPUs (docs/gpus.md): Llama-3.2 1B on the source of Python's library, byte by byte, with its speed.

    python examples/first_run.py         # a process for each card, with Muon
    python examples/first_run.py keep    # the same shards with AdamW, as the program has it

Without a card it trains a tiny model on two CPU processes, to try the program.
"""

import argparse
import sys
import time
from pathlib import Path

import lightning as L
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_muon import ParallelMuonStrategy

ON_GPU = torch.cuda.is_available()
LENGTH, ROWS_PER_RANK, STEPS = (2048, 4, 200) if ON_GPU else (64, 4, 60)
SIZES = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
SIZES |= {"num_key_value_heads": 8, "vocab_size": 128256}
if not ON_GPU:
    SIZES = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 256,
    }


class Llama(L.LightningModule):
    def __init__(self):
        super().__init__()
        with torch.device("meta"):  # Weights are made on the card, shard by shard.
            self.llama = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True, use_cache=False))

    def training_step(self, rows: torch.Tensor, index: int) -> torch.Tensor:
        return self.llama(input_ids=rows.long(), labels=rows.long()).loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-4, fused=ON_GPU)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, total_iters=50)
        return [optimizer], [{"scheduler": warmup, "interval": "step"}]


class Report(L.Callback):
    def on_train_batch_end(self, trainer, module, outputs, rows, index):
        if trainer.global_step % 20:
            return
        loss = trainer.strategy.reduce(outputs["loss"].detach(), reduce_op="mean").item()  # Waits for the card.
        now = time.perf_counter()
        if trainer.global_step > 20:  # The first steps open connections.
            seconds = (now - self.last) / 20
            tokens = rows.numel() * trainer.world_size / seconds
            gib = torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else 0
            speed = f"{seconds:.3f} s per step, {tokens:,.0f} tokens/s, peak {gib:.1f} GiB"
            trainer.print(f"step {trainer.global_step}: loss {loss:.3f}, {speed}")
        self.last = now


if __name__ == "__main__":
    L.seed_everything(0)
    files = sorted(Path(argparse.__file__).parent.rglob("*.py"))
    text = b"".join(file.read_bytes() for file in files if "site-packages" not in file.parts)  # 30 MB
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    loader = torch.utils.data.DataLoader(rows, batch_size=ROWS_PER_RANK, shuffle=True, drop_last=True)
    strategy = ParallelMuonStrategy(optimizer=sys.argv[1] if len(sys.argv) > 1 else "auto")
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    devices = "auto" if ON_GPU else 2
    trainer = L.Trainer(
        devices=devices, precision="bf16-mixed", max_steps=STEPS, strategy=strategy, callbacks=[Report()], **quiet
    )
    trainer.fit(Llama(), loader)
