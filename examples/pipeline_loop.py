"""The GPT-2 of pipeline_gpt.py in a loop of your own, with Accelerate.

torchrun --nproc-per-node 2 examples/pipeline_loop.py
"""

from __future__ import annotations

import argparse

import torch
from pipeline_data import Text, complete, model
from torch.utils.data import DataLoader

from lightning_muon import forward_backward
from lightning_muon.accelerate import Accelerator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    accelerator = Accelerator(cpu=True, options={"pipeline_size": 2, "sharding": "none"})
    gpt = model()
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=3e-3, weight_decay=0.01)
    loader = DataLoader(Text(16 * arguments.steps), batch_size=16)
    gpt, optimizer, loader = accelerator.prepare(gpt, optimizer, loader)

    for step, batch in enumerate(loader, start=1):
        loss = forward_backward(gpt, batch)  # In the place of gpt(**batch).loss and accelerator.backward(loss).
        accelerator.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == arguments.steps:
            accelerator.print(f"step {step}: loss {loss.item():.3f}")

    gpt.eval()
    text = complete(gpt, "The statement ")
    accelerator.print(repr(text))
    accelerator.end_training()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
