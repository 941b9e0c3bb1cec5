"""The GPT-2 of pipeline_gpt.py in a loop of your own, with Fabric.

python examples/pipeline_loop.py                             # 2 CPU processes
"""

from __future__ import annotations

import argparse

import torch
from lightning.fabric import Fabric
from pipeline_data import Text, complete, model
from torch.utils.data import DataLoader

from lightning_muon import ParallelMuonFabricStrategy, forward_backward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    strategy = ParallelMuonFabricStrategy(pipeline_size=2, sharding="none")
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    gpt = model()
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=3e-3, weight_decay=0.01)
    gpt, optimizer = fabric.setup(gpt, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(Text(16 * arguments.steps), batch_size=16))

    for step, batch in enumerate(loader, start=1):
        loss = forward_backward(gpt, batch)  # In the place of gpt(**batch).loss and fabric.backward(loss).
        fabric.clip_gradients(gpt, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == arguments.steps:
            fabric.print(f"step {step}: loss {loss.item():.3f}")

    gpt.eval()
    text = complete(gpt, "The statement ")
    fabric.print(repr(text))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
