"""What a run of ``table1`` leaves behind: one JSON line, appended when it ends."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = "results.jsonl"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The numbers of one run.

    Args:
        row: Name of the row.
        seed: Of the run.
        fingerprint: Of its settings.
        steps: Optimizer steps.
        samples_per_second: Of all ranks, while training.
        train_loss: Mean over the last epoch, nats per token (per position with ``paper_loss``).
        val_loss: After the last epoch.
        val_losses: After each epoch.
        sent_bytes: What the ranks of one node send to other nodes per step, on average.
        seconds: Of the training, validation included.
        num_parameters: Of the model.
        world: (nodes, ranks per node).
    """

    row: str
    seed: int
    fingerprint: str
    steps: int
    samples_per_second: float
    train_loss: float
    val_loss: float
    val_losses: list[float]
    sent_bytes: float
    seconds: float
    num_parameters: int
    world: tuple[int, int]


def append_result(path: Path, result: Result) -> None:
    """Add one line and wait until it is on disk; half a line that a killed process left stays a line of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        broken = file.seek(0, os.SEEK_END) > 0 and _last_byte(path) != b"\n"
        line = json.dumps(dataclasses.asdict(result)) + "\n"
        file.write(("\n" * broken + line).encode())
        file.flush()
        os.fsync(file.fileno())


def read_results(path: Path, fingerprints: Collection[str]) -> dict[str, Result]:
    """Fingerprint -> result of the runs that are asked for and stored; the last one where a run is stored twice.

    Args:
        path: Need not exist. Lines that were cut short are left out with a warning.
        fingerprints: Of runs; those of other settings are left out.
    """
    lines = path.read_text().splitlines() if path.exists() else []
    results = {}
    for number, line in enumerate(lines, start=1):
        try:
            content: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            _log.warning("%s:%d is no JSON and is left out", path, number)
            continue
        if content["fingerprint"] in fingerprints:
            content["world"] = tuple(content["world"])
            results[content["fingerprint"]] = Result(**content)
    return results


@dataclass(frozen=True, kw_only=True)
class RowSummary:
    """A row of the table: means over its seeds.

    Args:
        row: Name of the row.
        num_seeds: Number of results.
        lr_scale: Learning rate of all but the token embedding as a multiple of AdamW's.
        sent_bytes: See :class:`Result`.
        samples_per_second: See :class:`Result`.
        train_loss: See :class:`Result`.
        val_loss: See :class:`Result`.
        val_spread: Half of the range of ``val_loss`` over the seeds.
        val_losses: After each epoch.
    """

    row: str
    num_seeds: int
    lr_scale: float
    sent_bytes: float
    samples_per_second: float
    train_loss: float
    val_loss: float
    val_spread: float
    val_losses: list[float]


def summarize(
    row: str, results: Sequence[Result], *, lr_scale: float, samples_per_second: Sequence[float]
) -> RowSummary:
    """Means over the results of one row, of which there is at least one; NaN where no speed was measured."""
    validation = [result.val_loss for result in results]
    return RowSummary(
        row=row,
        num_seeds=len(results),
        lr_scale=lr_scale,
        sent_bytes=_mean([result.sent_bytes for result in results]),
        samples_per_second=_mean(samples_per_second),
        train_loss=_mean([result.train_loss for result in results]),
        val_loss=_mean(validation),
        val_spread=(max(validation) - min(validation)) / 2,
        val_losses=[_mean(epoch) for epoch in zip(*(result.val_losses for result in results), strict=True)],
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)
