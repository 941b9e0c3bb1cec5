"""``python -m recipes.t5_summarization.table1``: the grid of Table 1 of the FlexDeMo paper, as table and plot.

Each run is a command of its own (``table1_run``) whose result is stored when it ends, so the grid goes on where it
stopped: runs whose result is stored with the same settings are left out.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from recipes.t5_summarization.demo import set_environment
from recipes.t5_summarization.table1_config import Grid, Run, add_arguments, arguments_of, load_grid
from recipes.t5_summarization.table1_report import markdown_table, stored_results, summaries, write_report
from recipes.t5_summarization.table1_results import RESULTS, Result, read_results

ROOT = Path(__file__).parents[2]

Train = Callable[[Run, Path], int]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="rows of the file; default: its `grid`")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="SEED", help="default: those of the file")
    parser.add_argument(
        "--speed-steps",
        type=int,
        metavar="N",
        help="take samples/s from further runs of N steps: for a machine that did other work during the trainings",
    )
    parser.add_argument("--report-only", action="store_true", help="write table and plot of what is stored")
    return parser.parse_args(arguments)


def missing_runs(grid: Grid) -> list[Run]:
    """The runs whose result is not stored yet."""
    runs = grid.runs()
    stored = read_results(grid.output_dir / RESULTS, [run.fingerprint for run in runs])
    return [run for run in runs if run.fingerprint not in stored]


def run_grid(grid: Grid, train: Train, report: Callable[[], object]) -> list[Run]:
    """Run what is missing.

    Args:
        grid: What to run.
        train: Trains one run and stores its result; gets the file for its output and returns its exit status.
        report: Writes table and plot; called after each run.

    Returns:
        The runs that failed; the others are not kept from running by them.
    """
    runs, failed = missing_runs(grid), []
    print(f"{len(runs)} of {len(grid.runs())} runs to do; results in {grid.output_dir / RESULTS}", flush=True)
    for number, run in enumerate(runs, start=1):
        log = grid.output_dir / "logs" / f"{run.row}-{run.seed}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        status = train(run, log)
        result = read_results(grid.output_dir / RESULTS, [run.fingerprint]).get(run.fingerprint)
        if status != 0 or result is None:
            failed.append(run)
        text = f"failed with status {status}, see {log}" if run in failed or result is None else describe(result)
        print(f"[{number}/{len(runs)}] {run.row} seed {run.seed}, {time.monotonic() - start:.0f} s: {text}", flush=True)
        report()
    return failed


def describe(result: Result) -> str:
    """One line on a result."""
    return (
        f"val loss {result.val_loss:.3f}, train loss {result.train_loss:.3f}, "
        f"{result.samples_per_second:.1f} samples/s, {result.sent_bytes / 1e6:.4f} MB per step"
    )


def train_in_processes(run: Run, log: Path, *, arguments: Sequence[str]) -> int:
    """Run ``table1_run``; its exit status.

    Args:
        run: Which row and seed.
        log: Gets what the ranks print.
        arguments: The options that decide the settings.
    """
    command = [sys.executable, "-m", "recipes.t5_summarization.table1_run", "--row", run.row, "--seed", str(run.seed)]
    with log.open("w") as output:
        finished = subprocess.run([*command, *arguments], cwd=Path.cwd(), stdout=output, stderr=subprocess.STDOUT)
    return finished.returncode


def speed_options(options: argparse.Namespace) -> argparse.Namespace:
    """The options of the runs that measure samples/s.

    Args:
        options: Of :func:`parse`, with ``speed_steps``.
    """
    return argparse.Namespace(**{**vars(options), "max_steps": options.speed_steps})


def train_missing(grid: Grid, options: argparse.Namespace, report: Callable[[], object]) -> list[Run]:
    """Train what is not stored yet; the runs that failed.

    Args:
        grid: What ``options`` say.
        options: Of :func:`parse`.
        report: See :func:`run_grid`.
    """
    with tempfile.TemporaryDirectory() as folder:
        # A grid takes an hour, in which somebody may edit the file.
        copied = argparse.Namespace(**{**vars(options), "config": Path(shutil.copy(options.config, folder))})
        arguments = arguments_of(copied)
        return run_grid(grid, lambda run, log: train_in_processes(run, log, arguments=arguments), report)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the grid; 1 if a run failed.

    Args:
        arguments: None takes them from the command line.
    """
    options = parse(arguments)
    logging.basicConfig(level=logging.WARNING)
    set_environment()
    grid = load_grid(options, rows=options.rows, seeds=options.seeds)
    speeds = None
    if options.speed_steps is not None:
        speeds = load_grid(speed_options(options), rows=options.rows, seeds=grid.seeds[:1])
    failed: list[Run] = []
    if not options.report_only:
        failed = train_missing(grid, options, lambda: write_report(grid, speeds))
        if speeds is not None:
            failed += train_missing(speeds, speed_options(options), lambda: write_report(grid, speeds))
    paths = write_report(grid, speeds)
    if paths:
        print(markdown_table(summaries(grid, stored_results(grid), speeds), grid.labels))
        print("\n".join(f"written: {path}" for path in paths))
    if failed:
        print("failed: " + ", ".join(f"{run.row} seed {run.seed}" for run in failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
