"""The table and the plot of ``table1``, from the stored results."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from recipes.t5_summarization.files import write_atomically
from recipes.t5_summarization.table1_config import Grid
from recipes.t5_summarization.table1_results import RESULTS, Result, RowSummary, read_results, summarize

REFERENCE = "adamw"
COLUMNS = ("row", "MB per step", "samples/s", "train loss", "val loss", "vs AdamW", "lr factor", "seeds")
TOLERANCE = 0.01  # The paper's shape: k = 4 .. 8 within 1 % of AdamW's validation loss.


def write_report(grid: Grid, speeds: Grid | None = None) -> list[Path]:
    """Write table (Markdown and CSV) and plot of all stored results with the settings of ``grid``; their paths.

    Rows that were not asked for are shown too if they have results. Without any result nothing is written.

    Args:
        grid: The trainings.
        speeds: See :func:`summaries`.
    """
    results = stored_results(grid)
    rows = summaries(grid, results, speeds)
    if not rows:
        return []
    markdown, table, png = (grid.output_dir / f"table1.{suffix}" for suffix in ("md", "csv", "png"))
    write_atomically(markdown, report_text(grid, rows, results[0]))
    write_atomically(table, csv_text(rows, grid.labels))
    plot(rows, png, labels=grid.labels, steps=results[0].steps)
    return [markdown, table, png]


def stored_results(grid: Grid) -> list[Result]:
    """The results of all rows and of the seeds of ``grid`` that were run with its settings."""
    wanted = [grid.run(row, seed).fingerprint for row in grid.labels for seed in grid.seeds]
    stored = read_results(grid.output_dir / RESULTS, wanted)
    return [stored[fingerprint] for fingerprint in wanted if fingerprint in stored]


def summaries(grid: Grid, results: Sequence[Result], speeds: Grid | None = None) -> list[RowSummary]:
    """One summary for each row that has a result, in the order of the file.

    Args:
        grid: Names rows and settings.
        results: Of its runs.
        speeds: Runs that samples/s is taken from in place of ``results``, where they are stored.
    """
    measured = [] if speeds is None else stored_results(speeds)
    summarized = []
    for row in grid.labels:
        of_row = [result for result in results if result.row == row]
        if of_row:
            speed = [result.samples_per_second for result in measured or results if result.row == row]
            lr_scale = grid.settings[row]["row"]["lr_scale"]
            summarized.append(summarize(row, of_row, lr_scale=lr_scale, samples_per_second=speed))
    return summarized


def relative_to_reference(rows: Sequence[RowSummary]) -> dict[str, float]:
    """Row -> validation loss over that of AdamW, minus 1; empty without AdamW."""
    reference = next((row.val_loss for row in rows if row.row == REFERENCE), None)
    return {} if reference is None else {row.row: row.val_loss / reference - 1 for row in rows}


def markdown_table(rows: Sequence[RowSummary], labels: Mapping[str, str]) -> str:
    """The table for people."""
    relative = relative_to_reference(rows)
    lines = ["| " + " | ".join(COLUMNS) + " |", "| --- |" + " ---: |" * (len(COLUMNS) - 1)]
    for row in rows:
        cells = (
            labels[row.row],
            f"{row.sent_bytes / 1e6:.4f}",
            f"{row.samples_per_second:.1f}",
            f"{row.train_loss:.3f}",
            f"{row.val_loss:.3f}" + (f" +- {row.val_spread:.3f}" if row.num_seeds > 1 else ""),
            f"{relative[row.row]:+.1%}" if row.row in relative else "",
            f"{row.lr_scale:g}",
            str(row.num_seeds),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def csv_text(rows: Sequence[RowSummary], labels: Mapping[str, str]) -> str:
    """The table for programs; bytes and losses unrounded."""
    relative = relative_to_reference(rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = ("sent_bytes", "samples_per_second", "train_loss", "val_loss", "val_spread", "lr_scale", "num_seeds")
    writer.writerow(("row", "label", *names, "val_loss_vs_adamw"))
    for row in rows:
        values = [getattr(row, name) for name in names]
        writer.writerow((row.row, labels[row.row], *values, relative.get(row.row, "")))
    return text.getvalue()


def report_text(grid: Grid, rows: Sequence[RowSummary], result: Result) -> str:
    """The whole Markdown file.

    Args:
        grid: Whose results they are.
        rows: Of the table.
        result: Any of the results: they agree in steps, size and processes.
    """
    nodes, ranks = result.world
    samples = nodes * ranks * grid.settings[result.row]["data"]["batch_size"]
    heading = (
        f"{result.num_parameters / 1e6:.1f} million parameters, {nodes} nodes x {ranks} ranks, {result.steps} steps of "
        f"{samples} samples. Losses in nats per token; val loss: mean +- half of the range over the seeds; "
        "lr factor: learning rate of all but the token embedding, as a "
        f"multiple of AdamW's {grid.settings[result.row]['model']['lr']:g}."
    )
    differences = "\n".join(f"- {' '.join(sentence.split())}" for sentence in grid.differences)
    return (
        f"{heading}\n\n{markdown_table(rows, grid.labels)}\n\n"
        f"What differs from the paper (arXiv:2502.06728):\n\n{differences}\n"
    )


def plot(rows: Sequence[RowSummary], png: Path, *, labels: Mapping[str, str], steps: int) -> None:
    """Draw validation loss against MB per step, and against the step.

    Args:
        rows: Of the table.
        png: File to write.
        labels: Row -> text of the legend.
        steps: Optimizer steps of a run.
    """
    # Without pyplot: no window, no global state. Imported here: the trainings need no matplotlib.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.5), layout="constrained")
    traffic, curves = figure.subplots(1, 2)
    reference = next((row.val_loss for row in rows if row.row == REFERENCE), None)
    if reference is not None:
        band = (reference * (1 - TOLERANCE), reference * (1 + TOLERANCE))
        traffic.axhspan(*band, color="gray", alpha=0.2, label=f"AdamW +- {TOLERANCE:.0%}")
    colors = [f"C{index % 10}" for index in range(len(rows))]
    styles = ["-" if index < 10 else "--" for index in range(len(rows))]
    for row, color, style in zip(rows, colors, styles, strict=True):
        megabytes = row.sent_bytes / 1e6
        traffic.errorbar(megabytes, row.val_loss, yerr=row.val_spread, marker="o", capsize=3, color=color)
        traffic.annotate(row.row, (megabytes, row.val_loss), xytext=(4, 4), textcoords="offset points", fontsize=8)
        at = [steps * (epoch + 1) / len(row.val_losses) for epoch in range(len(row.val_losses))]
        curves.plot(at, row.val_losses, style, marker=".", color=color, label=labels[row.row])
    traffic.set(xscale="log", xlabel="MB that a node sends per step", ylabel="validation loss, nats per token")
    curves.set(xlabel="optimizer step", ylabel="validation loss, nats per token")
    curves.legend(fontsize=8)
    figure.savefig(png, dpi=120)
