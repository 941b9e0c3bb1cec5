"""``python -m recipes.vowels.demo``: the same training with AdamW on DDP and with one line changed, side by side.

Options of LightningCLI go to both trainings, for instance ``--trainer.max_steps 100``.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIG = Path(__file__).with_name("demo.yaml")
FOLDER = Path("outputs/vowels")
SAMPLE = ("hidden", "filled", "right")
STRATEGIES = {"ddp": 'AdamW, strategy="ddp"', "parallel_muon": 'strategy="parallel_muon"'}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What one training has logged after every validation, and examples of its last one."""

    steps: list[int]
    seconds: list[float]  # Of forward, backward and optimizer steps.
    losses: list[float]  # Mean over the hidden letters, in nats.
    accuracies: list[float]
    examples: list[tuple[str, str, str]]  # (hidden, filled, right)


def fit(strategy: str, arguments: list[str]) -> None:
    """One training; every rank runs it."""
    from lightning.pytorch.cli import LightningCLI

    import lightning_muon  # noqa: F401  registers the strategies

    # Nothing that a user of the demo can change; the arguments are read again by the ranks that Lightning starts.
    warnings.filterwarnings("ignore", ".*deprecated|LightningCLI's args parameter", Warning, "lightning")
    place = ["--trainer.strategy", strategy, "--trainer.logger.init_args.name", strategy]
    parser = {"default_config_files": [str(CONFIG)]}
    cli = LightningCLI(args=[*place, *arguments], run=False, parser_kwargs=parser)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    folder = Path(cli.trainer.log_dir)
    if cli.trainer.is_global_zero:
        samples = [dict(zip(SAMPLE, example, strict=True)) for example in cli.model.examples]
        (folder / "samples.json").write_text(json.dumps(samples))


def run(arguments: list[str]) -> str:
    """Train with each strategy, one after the other; draw the curves and return the report."""
    curves: dict[str, Curve] = {}
    for strategy, title in STRATEGIES.items():
        print(f"\n{title}", flush=True)
        # A process of its own: Lightning's launcher runs the command of the main process once for each further rank.
        command = [sys.executable, "-m", "recipes.vowels.demo", "fit", strategy, *arguments]
        subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ}, check=True)
        curves[strategy] = read(newest(FOLDER / strategy))
    picture = FOLDER / "adamw-and-muon.png"
    plot(curves, picture)
    return f"{report(curves)}\n\nBoth curves: {picture}"


def newest(folder: Path) -> Path:
    """The folder of the newest run below ``folder``."""
    return max(folder.glob("version_*"), key=lambda path: int(path.name.removeprefix("version_")))


def read(folder: Path) -> Curve:
    """What a run has left."""
    with (folder / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["val_loss"]]
    return Curve(
        steps=[int(row["step"]) + 1 for row in rows],
        seconds=[float(row["seconds"]) for row in rows],
        losses=[float(row["val_loss"]) for row in rows],
        accuracies=[float(row["val_accuracy"]) for row in rows],
        examples=[tuple(sample.values()) for sample in json.loads((folder / "samples.json").read_text())],
    )


def plot(curves: dict[str, Curve], png: Path) -> None:
    """Validation loss over steps and over seconds of training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    by_steps, by_seconds = figure.subplots(1, 2, sharey=True)
    for strategy, curve in curves.items():
        by_steps.plot(curve.steps, curve.losses, marker="o", markersize=3, label=STRATEGIES[strategy])
        by_seconds.plot(curve.seconds, curve.losses, marker="o", markersize=3)
    by_steps.set(xlabel="optimizer step", ylabel="validation loss, nats per hidden vowel")
    by_seconds.set(xlabel="seconds of training")
    by_steps.legend()
    figure.savefig(png, dpi=120)


def report(curves: dict[str, Curve]) -> str:
    """Sentences as both models fill them, and the two results."""
    adamw, muon = curves["ddp"], curves["parallel_muon"]
    lines: list[str] = []
    for (hidden, by_adamw, right), (_, by_muon, _) in list(zip(adamw.examples, muon.examples, strict=True))[:6]:
        lines += [f"hidden  {hidden}", f"AdamW   {by_adamw}", f"Muon    {by_muon}", f"right   {right}", ""]
    lines.append(f"{'':28}{'loss':>8}{'vowels right':>14}{'seconds':>9}")
    for strategy, curve in curves.items():
        result = f"{curve.losses[-1]:8.3f}{curve.accuracies[-1]:14.1%}{curve.seconds[-1]:9.0f}"
        lines.append(f"{STRATEGIES[strategy]:28}{result}")
    reached = (step for step, loss in zip(muon.steps, muon.losses, strict=True) if loss <= adamw.losses[-1])
    caught_up = next(reached, None)
    if caught_up is not None:
        lines.append(f"Muon has AdamW's last loss after {caught_up} of {adamw.steps[-1]} steps.")
    return "\n".join(lines)


def main() -> None:
    """Entry point of the demo, and of each training that it starts."""
    if sys.argv[1:2] == ["fit"]:
        strategy, arguments = sys.argv[2], sys.argv[3:]
        fit(strategy, arguments)
    elif any(word.startswith(("-h", "--help", "--print_config")) for word in sys.argv[1:]):
        fit("parallel_muon", sys.argv[1:])  # LightningCLI prints it, and ends.
    else:
        print(run(sys.argv[1:]), flush=True)


if __name__ == "__main__":
    main()
