"""What MuonMonitor costs: seconds in its hooks beside those of a training, on gloo processes or one CUDA device.

    python benchmarks/step_monitor.py

A decoder is trained on random tokens with FSDP2 and ParallelMuon. The time of the monitor is that inside of its hooks;
a measured step also has two calls of a clock per op. On a CPU it is time of the processor, for which other programs on
the machine matter little.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_muon import ParallelMuon, StepMonitor
from lightning_muon.monitor.calibrate import run_on_ranks, this_device

VOCABULARY = 512


class Decoder(nn.Module):
    """Logits of the next token."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        layer = partial(
            nn.TransformerEncoderLayer, width, width // 64, 4 * width, 0.0, batch_first=True, norm_first=True
        )
        self.embedding, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.layers = nn.ModuleList(layer() for _ in range(num_layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, (rows, positions, words)."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1), device=tokens.device)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 2), ("width", 256), ("layers", 4), ("rows", 4), ("length", 128), ("steps", 150)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--every", type=int, default=50, help="every_n_steps of the monitor")
    arguments = parser.parse_args()
    step, measured, between = run_on_ranks(partial(_measure, arguments), num_ranks=arguments.ranks)
    share = (measured + (arguments.every - 1) * between) / (arguments.every * step)
    print("| ms per step | ms of the monitor in a measured step | us in another one | share of the training |")
    print("| ---: | ---: | ---: | ---: |")
    print(f"| {1e3 * step:.1f} | {1e3 * measured:.2f} | {1e6 * between:.1f} | {share:.3%} |")


def _measure(arguments: argparse.Namespace) -> tuple[float, float, float]:
    """Mean seconds of a step, of the monitor in a measured step, and in another one. Collective."""
    device = this_device()
    torch.manual_seed(dist.get_rank())
    model = Decoder(arguments.width, arguments.layers).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh)
    optimizer = ParallelMuon(model, lr=1e-3)
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    spent: list[float] = []

    class Timed(StepMonitor):
        def _before_step(self, *arguments: Any) -> Any:
            spent.append(clock())
            result = super()._before_step(*arguments)
            spent[-1] -= clock()
            return result

        def _after_step(self, *arguments: Any) -> None:
            begun = clock()
            super()._after_step(*arguments)
            spent[-1] -= clock() - begun

    monitor = Timed(optimizer, model, every_n_steps=arguments.every)
    for step in range(arguments.steps + 1):
        if step == 1:  # The first one makes the plan.
            begun = clock()
        tokens = torch.randint(VOCABULARY, (arguments.rows, arguments.length + 1), device=device)
        monitor.count(tokens.numel())
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = (clock() - begun) / arguments.steps
    every = [-each for each in spent[arguments.every - 1 :: arguments.every]]
    others = [-each for number, each in enumerate(spent, 1) if number % arguments.every and number > 1]
    monitor.close()
    return seconds, sum(every) / len(every), sum(others) / len(others)


if __name__ == "__main__":
    main()
