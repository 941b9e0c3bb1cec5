"""Losses of the T5 recipe with AdamW, Muon and its relatives, after AdamW and Muon have got their learning rates.

    python benchmarks/t5_loss.py --out results/t5 --picture t5-losses.svg
    python benchmarks/t5_loss.py --only muon fast 'mine={"momentum": 0.9}' --seeds 0 --out results/t5

Runs recipes/t5_summarization/demo.yaml (the body of a docstring to its summary line, with the docstrings of the
installed packages) in one process with one thread per run, 32 rows a step. "adamw" is Lightning's own strategy with the
recipe's torch.optim.AdamW; the others are ParallelMuonStrategy with these options of the optimizer. With a seed of its
own AdamW gets the best pair of --rates and --embedding-rates; all others keep it for AdamW's parameters and take the
best of --factors of Muon.

Each run leaves a folder in --out and is not run again as long as that is there. Ends with a Markdown table: the last
validation loss, in nats per token, and ROUGE-L, each with its mean and standard deviation over the seeds.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml

from benchmarks.loss import TUNING_SEED, configurations

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "recipes/t5_summarization/demo.yaml"
# Names of those of benchmarks/loss.py.
DEFAULT = ("muon", "fast", "polar_express", "normuon", "cautious decay")
# Its name, options of the optimizer (None is torch's AdamW), rates of AdamW for matrices and token embedding, seed.
Run = tuple[str, dict[str, Any] | None, tuple[float, float], int]


def settings(options: dict[str, Any] | None, rates: tuple[float, float], seed: int, epochs: int) -> dict[str, Any]:
    """What a run changes in demo.yaml; ``rates`` are those of the matrices and of the token embedding."""
    here = {"replicate_size": 1, "shard_size": 1, "optimizer": options}
    muon = {"class_path": "lightning_muon.ParallelMuonStrategy", "init_args": here}
    trainer = {"devices": 1, "strategy": "auto" if options is None else muon, "max_epochs": epochs}
    quiet = {"enable_progress_bar": False, "enable_checkpointing": False, "callbacks": None}
    rates_of = {"lr": rates[0], "embedding_lr_scale": rates[1] / rates[0]}
    rows = {"batch_size": 32, "cache_dir": str(ROOT / "outputs/cache")}
    return {
        "seed_everything": seed,
        "trainer": trainer | quiet,
        "model": {"class_path": "recipes.t5_summarization.model.T5Summarizer", "init_args": rates_of},
        "data": {"class_path": "recipes.t5_summarization.data.SummarizationData", "init_args": rows},
    }


def train(out: Path, name: str, run: dict[str, Any]) -> Path:
    """Train unless that was done; the CSV log."""
    digest = hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:8]
    folder = out / f"{name}-{run['seed_everything']}-{digest}".replace(" ", "_")
    if not folder.exists():
        running = folder.with_suffix(".running")
        running.mkdir(parents=True, exist_ok=True)
        overrides = running / "overrides.yaml"
        overrides.write_text(yaml.safe_dump(run))
        words = ["fit", "--config", DEMO, "--config", overrides]
        words += ["--trainer.logger.init_args.save_dir", running.resolve()]
        command = [sys.executable, "-m", "lightning_muon", *map(str, words)]
        with (running / "output.txt").open("w") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)
        running.rename(folder)
    return max(folder.rglob("metrics.csv"), key=lambda path: path.stat().st_mtime)


def validations(log: Path) -> list[tuple[int, float, float]]:
    """Step, loss and ROUGE-L of each validation; ROUGE is not of the untrained model."""
    with log.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("val_loss")]
    return [(int(row["step"]), float(row["val_loss"]), float(row.get("rougeL") or 0)) for row in rows]


class Trainings:
    """All runs of one command line, some at once."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.out, self.epochs = arguments.out, arguments.epochs
        self._pool = ThreadPoolExecutor(arguments.workers)

    def curves(self, runs: Sequence[Run]) -> list[Any]:
        """The validations of each."""

        def one(run: Run) -> Any:
            name, options, rates, seed = run
            found = validations(train(self.out, name, settings(options, rates, seed, self.epochs)))
            print(f"{name} {options or ''} at {rates[0]:g}, {rates[1]:g}, seed {seed}: {found[-1][1]:.4f}", flush=True)
            return found

        return list(self._pool.map(one, runs))

    def best_rates(self, rates: list[float], embedding_rates: list[float]) -> tuple[float, float]:
        """Those of AdamW with the least loss."""
        pairs = [(rate, embedding) for rate in rates for embedding in embedding_rates]
        losses = [each[-1][1] for each in self.curves([("adamw", None, pair, TUNING_SEED) for pair in pairs])]
        return pairs[losses.index(min(losses))]

    def best_factor(self, rates: tuple[float, float], factors: list[float]) -> float:
        """The ``muon_lr_factor`` of Muon with the least loss."""
        runs: list[Run] = [("muon", {"muon_lr_factor": factor}, rates, TUNING_SEED) for factor in factors]
        losses = [each[-1][1] for each in self.curves(runs)]
        return factors[losses.index(min(losses))]


def table(curves: dict[str, list[Any]]) -> str:
    """One row for each configuration."""
    lines = [["configuration", "validation loss", "ROUGE-L"], ["---", "---:", "---:"]]
    for name, found in curves.items():
        cells = list[str]()
        for column, digits in ((1, 4), (2, 3)):
            lasts = [each[-1][column] for each in found]
            spread = f" +- {stdev(lasts):.{digits}f}" if len(lasts) > 1 else ""
            cells.append(f"{mean(lasts):.{digits}f}{spread}")
        lines.append([name, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(curves: dict[str, list[Any]], path: Path) -> None:
    """The picture: a line for each seed, without the untrained model."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for number, (name, found) in enumerate(curves.items()):
        for seed, each in enumerate(found):
            steps, losses, _ = zip(*each[1:], strict=True)
            axes.plot(steps, losses, color=f"C{number}", linewidth=1, label=None if seed else name)
    axes.set(xlabel="optimizer step", ylabel="validation loss, nats per token")
    axes.legend()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "lightning-muon"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Run what the command line names and --out does not have yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=DEFAULT, metavar="CONFIGURATION")
    parser.add_argument("--rates", nargs="+", type=float, default=[5e-4, 1e-3, 2e-3, 4e-3])
    parser.add_argument("--embedding-rates", nargs="+", type=float, default=[1e-2, 4e-2, 1.6e-1])
    parser.add_argument("--factors", nargs="+", type=float, default=[0.5, 1, 2, 4, 8])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=4, help="of 160 steps; default 4")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("losses"))
    parser.add_argument("--picture", type=Path, help="file to draw the losses into, such as losses.svg")
    arguments = parser.parse_args()
    chosen, trainings = configurations(arguments.only), Trainings(arguments)
    rates = trainings.best_rates(arguments.rates, arguments.embedding_rates)
    factor = trainings.best_factor(rates, arguments.factors)
    named = [
        (name, None if options is None else {"muon_lr_factor": factor} | options, rates, seed)
        for name, options in chosen.items()
        for seed in arguments.seeds
    ]
    found, count = trainings.curves(named), len(arguments.seeds)
    curves = {name: found[number * count : (number + 1) * count] for number, name in enumerate(chosen)}
    print(f"\nrates of AdamW: {rates[0]:g}, embedding {rates[1]:g}; factor of Muon: {factor:g}\n\n{table(curves)}")
    if arguments.picture:
        draw(curves, arguments.picture)


if __name__ == "__main__":
    main()
