"""Which learning rate Muon needs beside AdamW's, and what the one line does to unchanged programs.

python benchmarks/muon_rate.py --programs decoder CNN --seeds 0 1 2 --factors 1 3 --out rates.csv

Trains each program of small_programs.py with AdamW at each of --rates, and with ParallelMuon at the same rates and each
``muon_lr_factor`` of --factors; one process and one thread. Rows of --out: program, optimizer, learning rate, factor
(0 for AdamW), seed, merit (held-out loss, or the error of the GAN's samples: less is better), seconds. Ends with a
table of the means over the seeds. Needs scikit-learn, for its scanned digits.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections import defaultdict
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.small_programs import PROGRAMS, Program, player, rate_at, ring, sample_error
from lightning_muon import ParallelMuon

Row = tuple[str, float, float, int]  # program, learning rate, factor, seed


def make_optimizer(
    module: nn.Module, *, lr: float, factor: float, weight_decay: float, betas: tuple[float, float] = (0.9, 0.999)
) -> torch.optim.Optimizer:
    """AdamW for a factor of 0, else ParallelMuon."""
    if not factor:
        return torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=weight_decay, betas=betas)
    return ParallelMuon(module, lr=lr, muon_lr_factor=factor, weight_decay=weight_decay, betas=betas)


def train(program: Program, *, lr: float, factor: float, seed: int) -> float:
    """The mean loss on held-out data after the training."""
    torch.manual_seed(seed)
    model = program.model()
    optimizer = make_optimizer(model, lr=lr, factor=factor, weight_decay=program.weight_decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, program))
    batches = program.batches(torch.Generator().manual_seed(1000 + seed))
    model.train()
    for _, batch in zip(range(program.steps), batches, strict=False):
        program.loss(model, batch).backward()
        if program.decays:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        return mean(float(program.loss(model, batch)) for batch in program.held_out())


def train_gan(*, lr: float, factor: float, seed: int, steps: int = 2000) -> float:
    """The distance of the samples from the data after the training."""
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(1000 + seed)
    drawer, judge = player(8, 2), player(2, 1)
    drawing, judging = (
        make_optimizer(each, lr=lr, factor=factor, weight_decay=0.0, betas=(0.5, 0.999)) for each in (drawer, judge)
    )
    for _ in range(steps):
        fakes = drawer(torch.randn(128, 8))
        judging.zero_grad()
        (F.softplus(judge(fakes.detach())).mean() + F.softplus(-judge(ring(data, 128))).mean()).backward()
        judging.step()
        drawing.zero_grad()
        F.softplus(-judge(drawer(torch.randn(128, 8)))).mean().backward()
        drawing.step()
    with torch.no_grad():
        return sample_error(drawer(torch.randn(4096, 8)), ring(data, 4096))


def table(merits: dict[Row, float]) -> str:
    """Means over the seeds, as Markdown: a row for each program and rate, a column for each factor."""
    cells: dict[tuple[str, float], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (program, lr, factor, _), merit in merits.items():
        cells[program, lr][factor].append(merit)
    factors = sorted({factor for row in cells.values() for factor in row})
    titles = ["program", "lr", *(f"factor {factor:g}" if factor else "AdamW" for factor in factors)]
    lines = [titles, ["---"] * len(titles)]
    for (program, lr), row in cells.items():
        lines.append([program, f"{lr:g}", *(f"{mean(row[factor]):.3f}" if factor in row else "" for factor in factors)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Run what the command line names and --out does not have yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*PROGRAMS, "GAN"]
    parser.add_argument("--programs", nargs="+", choices=names, default=names)
    parser.add_argument("--rates", nargs="+", type=float, default=[3e-4, 1e-3, 3e-3])
    parser.add_argument("--factors", nargs="+", type=float, default=[1, 2, 3, 4])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("muon_rate.csv"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    merits: dict[Row, float] = {}
    if arguments.out.exists():
        with arguments.out.open(newline="") as file:
            for program, _, lr, factor, seed, merit, _ in csv.reader(file):
                merits[program, float(lr), float(factor), int(seed)] = float(merit)
    rows = [
        (program, lr, factor, seed)
        for seed in arguments.seeds
        for program in arguments.programs
        for factor in (0, *arguments.factors)
        for lr in arguments.rates
    ]
    with arguments.out.open("a", newline="") as file:
        for row in rows:
            if row in merits:
                continue
            program, lr, factor, seed = row
            start = time.perf_counter()
            if program == "GAN":
                merits[row] = train_gan(lr=lr, factor=factor, seed=seed)
            else:
                merits[row] = train(PROGRAMS[program], lr=lr, factor=factor, seed=seed)
            seconds = time.perf_counter() - start
            optimizer = "ParallelMuon" if factor else "AdamW"
            csv.writer(file).writerow([program, optimizer, lr, factor, seed, f"{merits[row]:.4f}", f"{seconds:.1f}"])
            file.flush()
            print(*row, f"{merits[row]:.4f}", flush=True)
    print(table({row: merit for row, merit in merits.items() if row in rows}))


if __name__ == "__main__":
    main()
