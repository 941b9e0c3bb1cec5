"""Grids of the command line and made-up results, for the tests of Table 1."""

import dataclasses
from pathlib import Path
from typing import Any

from recipes.t5_summarization.table1 import parse
from recipes.t5_summarization.table1_config import Grid, Run, load_grid
from recipes.t5_summarization.table1_results import Result


def grid_of(*arguments: str, folder: Path | None = None) -> Grid:
    options = parse(list(arguments))
    grid = load_grid(options, rows=options.rows, seeds=options.seeds)
    return grid if folder is None else dataclasses.replace(grid, output_dir=folder)


def result_of(run: Run, val_loss: float, **changes: Any) -> Result:
    fields: dict[str, Any] = {
        "row": run.row,
        "seed": run.seed,
        "fingerprint": run.fingerprint,
        "steps": 40,
        "samples_per_second": 12.5,
        "train_loss": val_loss - 0.5,
        "val_loss": val_loss,
        "val_losses": [val_loss + 1, val_loss],
        "sent_bytes": 123_400.0,
        "seconds": 9.0,
        "num_parameters": 1_500_000,
        "world": (2, 2),
    }
    return Result(**{**fields, **changes})
