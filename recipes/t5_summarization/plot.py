"""A picture of the losses of one run."""

from __future__ import annotations

import csv
from pathlib import Path


def read_metric(metrics_csv: Path, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one column of Lightning's CSVLogger; both empty if it was never logged."""
    with metrics_csv.open(newline="") as file:
        points = [(int(row["step"]), float(row[name])) for row in csv.DictReader(file) if row.get(name)]
    return [step for step, _ in points], [value for _, value in points]


def plot_losses(metrics_csv: Path, png: Path, *, untrained: float | None, unigram: float) -> None:
    """Draw training loss per step, validation loss per epoch and the unigram entropy.

    Args:
        metrics_csv: As CSVLogger writes it.
        png: File to write.
        untrained: Validation loss before the first step, if it was measured.
        unigram: Entropy of the validation targets, nats per token.
    """
    # Imported here, and without pyplot: no window, no global state, and no matplotlib in a plain fit.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*read_metric(metrics_csv, "train_loss_step"), linewidth=0.8, alpha=0.7, label="train, per step")
    steps, losses = read_metric(metrics_csv, "val_loss")
    if untrained is not None:
        steps, losses = [0, *steps], [untrained, *losses]
    axes.plot(steps, losses, marker="o", label="validation")
    axes.axhline(unigram, color="gray", linestyle="--", linewidth=1, label="unigram entropy")
    axes.set(xlabel="optimizer step", ylabel="loss, nats per token", title="T5 summarization")
    axes.legend()
    figure.savefig(png, dpi=120)
