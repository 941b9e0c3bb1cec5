"""The grid of ``table1.yaml`` as data: rows, seeds, and the settings of each run."""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CONFIG = Path(__file__).with_name("table1.yaml")
OPTIMIZERS = ("adamw", "muon", "flexdemo")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training: a row of the table with one seed.

    Args:
        row: Name of the row.
        seed: Of the initial weights and the order of the training rows.
        settings: Everything that decides the result: ``trainer``, ``strategy``, ``model``, ``data`` and ``row``.
    """

    row: str
    seed: int
    settings: Mapping[str, Any]

    @property
    def fingerprint(self) -> str:
        """Equal only for runs with equal settings, row and seed."""
        content = {"row": self.row, "seed": self.seed, **self.settings}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What ``table1.yaml`` says about one size, with the changes of the command line.

    Args:
        size: Name of the size.
        output_dir: Where results, table and plot go.
        labels: Row -> text of the table, all rows that exist, in their order.
        rows: The rows to run.
        seeds: The seeds to run.
        settings: Row -> settings; see :class:`Run`.
        differences: What differs from the paper, one sentence each.
    """

    size: str
    output_dir: Path
    labels: Mapping[str, str]
    rows: Sequence[str]
    seeds: Sequence[int]
    settings: Mapping[str, Mapping[str, Any]]
    differences: Sequence[str]

    def run(self, row: str, seed: int) -> Run:
        """The run of that row and seed."""
        return Run(row=row, seed=seed, settings=self.settings[row])

    def runs(self) -> list[Run]:
        """All runs, seed by seed, so that a table without gaps is there early."""
        return [self.run(row, seed) for seed in self.seeds for row in self.rows]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that change the settings of a run."""
    parser.add_argument("--config", type=Path, default=CONFIG, help="file like table1.yaml")
    parser.add_argument("--size", default="demo", help="one of the sizes of the file")
    parser.add_argument("--max-steps", type=int, help="shorten the trainings to at most so many optimizer steps")
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="change settings, for instance data.source=wikihow.csv or row.lr_scale=0.5; values are JSON or text",
    )


def arguments_of(options: argparse.Namespace) -> list[str]:
    """The command line that :func:`add_arguments` reads as the same options."""
    arguments = ["--config", str(options.config), "--size", options.size]
    if options.max_steps is not None:
        arguments += ["--max-steps", str(options.max_steps)]
    return [*arguments, "--set", *options.set] if options.set else arguments


def load_grid(
    options: argparse.Namespace, *, rows: Sequence[str] | None = None, seeds: Sequence[int] | None = None
) -> Grid:
    """Read the file and apply the options.

    Args:
        options: Of :func:`add_arguments`.
        rows: The rows to run; None takes those of the file's ``grid``.
        seeds: The seeds to run; None takes those of the file.

    Raises:
        ValueError: If a row, size or setting does not exist.
    """
    config = yaml.safe_load(options.config.read_text())
    size = _choose(config["sizes"], options.size, "size")
    for row in rows or []:
        _choose(config["rows"], row, "row")
    settings = {
        name: _settings(size, row_settings(name, row, config["flexdemo"], size.get("lr_scales", {})), options)
        for name, row in config["rows"].items()
    }
    return Grid(
        size=options.size,
        output_dir=Path(size["output_dir"]),
        labels={name: row["label"] for name, row in config["rows"].items()},
        rows=list(rows or config["grid"]),
        seeds=list(config["seeds"] if seeds is None else seeds),
        settings=settings,
        differences=[*size["differences"], *config["differences"]],
    )


def row_settings(
    name: str, row: Mapping[str, Any], flexdemo: Mapping[str, Any], lr_scales: Mapping[str, float]
) -> dict[str, Any]:
    """What decides the optimizer of a row: ``optimizer``, ``options``, ``replicator`` and ``lr_scale``.

    Args:
        name: Of the row.
        row: As in the file.
        flexdemo: Options of all FlexDeMo rows.
        lr_scales: Name or ``base`` of a FlexDeMo row -> its learning rate as a multiple of AdamW's, where it is not 1.
    """
    if row["optimizer"] not in OPTIMIZERS:
        raise ValueError(f"{row['label']}: optimizer must be one of {OPTIMIZERS}, got {row['optimizer']!r}")
    common = flexdemo if row["optimizer"] == "flexdemo" else {}
    options = {**common, **row.get("options", {})}
    return {
        "optimizer": row["optimizer"],
        "options": options,
        "replicator": dict(row.get("replicator", {})),
        "lr_scale": lr_scales.get(name, lr_scales.get(options.get("base", ""), 1.0)),
    }


def _settings(size: Mapping[str, Any], row: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    settings = copy.deepcopy({key: size[key] for key in ("trainer", "strategy", "model", "data")})
    settings["row"] = row
    for assignment in options.set:
        _set(settings, assignment)
    if options.max_steps is not None:
        settings["trainer"].update(shortened(settings["trainer"], options.max_steps))
    return settings


def shortened(trainer: Mapping[str, Any], max_steps: int) -> dict[str, int]:
    """``max_epochs`` and ``limit_train_batches`` for at most ``max_steps`` steps in epochs of equal length.

    A validation ends each epoch, so the last step is followed by one, which ``Trainer(max_steps=...)`` would leave out.

    Args:
        trainer: Has ``max_epochs``, and ``limit_train_batches`` unless an epoch is all of the data.
        max_steps: Optimizer steps, at least 1.
    """
    if max_steps < 1:
        raise ValueError(f"--max-steps must be at least 1, got {max_steps}")
    epochs = min(trainer["max_epochs"], max_steps)
    batches, limit = max_steps // epochs, trainer.get("limit_train_batches")
    return {"max_epochs": epochs, "limit_train_batches": min(batches, limit) if isinstance(limit, int) else batches}


def _set(settings: dict[str, Any], assignment: str) -> None:
    """Apply ``section.key=value``; deeper keys may be new, sections may not."""
    path, separator, text = assignment.partition("=")
    *sections, key = path.split(".")
    if not separator or not sections:
        raise ValueError(f"--set needs section.key=value, got {assignment!r}")
    target = settings
    for section in sections:
        target = _choose(target, section, f"section of --set {assignment}:")
    try:
        target[key] = json.loads(text)
    except json.JSONDecodeError:
        target[key] = text


def _choose(options: Mapping[str, Any], name: str, what: str) -> Any:
    if name not in options:
        raise ValueError(f"{what} {name!r} does not exist; there are {', '.join(options)}")
    return options[name]
