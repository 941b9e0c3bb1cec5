"""Lightning Fabric: a loop of your own, with micro-batches, clipping, a schedule and a checkpoint.

python examples/fabric_loop.py --devices 2 --steps 40 --directory /tmp/fabric_loop
Run it again with more steps to go on from the checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_muon  # noqa: F401 - registers the strategies

VOCABULARY, WIDTH, LENGTH = 32, 64, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Predicts the next token from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sequences(num_samples: int = 512) -> TensorDataset:
    """Each token decides the next: 5 x + 3."""
    tokens = [torch.randint(VOCABULARY, (num_samples, 1), generator=torch.Generator().manual_seed(1))]
    for _ in range(LENGTH):
        tokens.append((5 * tokens[-1] + 3) % VOCABULARY)
    return TensorDataset(torch.cat(tokens, dim=1))


def train(fabric: Fabric, *, steps: int, accumulate: int, directory: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(sequences(), batch_size=8, shuffle=True))

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    checkpoint = directory / "checkpoint"
    if checkpoint.exists():
        fabric.load(checkpoint, state)
    if state["step"] >= steps:
        fabric.print(f"{checkpoint} is at step {state['step']}, so --steps {steps} leaves nothing to do")
        return

    loss, index = torch.zeros(()), 0
    while state["step"] < steps:
        for (tokens,) in loader:
            index += 1
            is_last = index % accumulate == 0
            with fabric.no_backward_sync(model, enabled=not is_last):
                loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
                fabric.backward(loss / accumulate)
            if not is_last:
                continue
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            state["step"] += 1
            if state["step"] == steps:
                break

    fabric.save(checkpoint, state)
    loss = fabric.all_reduce(loss.detach())
    fabric.print(f"step {state['step']} loss {float(loss):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--strategy", default="parallel_muon", help="or flexdemo, or one of Fabric's own")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--directory", type=Path, default=Path("fabric_loop"))
    arguments = parser.parse_args()
    fabric = Fabric(accelerator=arguments.accelerator, devices=arguments.devices, strategy=arguments.strategy)
    fabric.launch()
    fabric.seed_everything(0)
    train(fabric, steps=arguments.steps, accumulate=arguments.accumulate, directory=arguments.directory)


if __name__ == "__main__":
    main()
