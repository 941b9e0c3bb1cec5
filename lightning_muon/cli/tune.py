"""``lightning-muon tune``: short runs of ``lightning-muon fit`` with several values of ``muon_lr_factor``."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from lightning_muon.cli.table import count, positive
from lightning_muon.errors import NonFiniteGradientError
from lightning_muon.integrations.registry import STRATEGY_NAME, TRAINERS, first_installed

_DESCRIPTION = """Train as fit --config FILE does, a few steps with each factor, always from the same seed; without
logger, checkpoints and early stopping. Prints the mean loss of the last tenth of the steps, the validation loss after
them, and what to put into FILE."""
# Callbacks that need what is turned off.
_OFF = ("Checkpoint", "EarlyStopping", "Monitor", "ProgressBar", "ModelSummary")
_SAID_BY_FIT = "lightning-muon fit: "  # In front of a message on a wrong file.
_LEARNING_RATES = (("optimizer", "lr"), ("model", "lr"), ("model", "learning_rate"))
_TRAINER: dict[str, Any] = {
    "logger": False,
    "min_epochs": None,
    "max_epochs": -1,
    "min_steps": None,
    "num_sanity_val_steps": 0,
    # One validation, when `_Measure` ends the training.
    "val_check_interval": 10**9,
    "check_val_every_n_epoch": None,
}
_Callback: Any = importlib.import_module(first_installed(TRAINERS, "lightning-muon tune needs Lightning")).Callback


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description, add = _DESCRIPTION, parser.add_argument
    add("--config", required=True, metavar="FILE", help="a file of lightning-muon fit")
    add("--factors", type=positive, nargs="+", default=[1.0, 2.0, 3.0, 5.0, 8.0], help="default: 1 2 3 5 8")
    add("--lrs", type=positive, nargs="+", default=[None], help="learning rates (default: that of the program)")
    add("--steps", type=count, default=100, help="optimizer steps of each training (default: %(default)s)")


def run(arguments: argparse.Namespace) -> None:
    """Train with every pair of values, one after the other, and print the table."""
    # With the defaults of all classes.
    printed = yaml.safe_load(_fit("--config", arguments.config, "--print_config"))
    finite: list[dict[str, Any]] = []
    sys.stdout.write(f"{'lr':>10}{'factor':>8}{'loss':>10}{'validation':>12}\n")
    for lr, factor in product(arguments.lrs, arguments.factors):
        row = _train(arguments, printed, lr, factor)
        loss, validation = ("" if row[key] is None else f"{row[key]:.4f}" for key in ("loss", "validation"))
        diverged = not all(math.isfinite(row[key] or 0) for key in ("loss", "validation"))
        rest = "  diverged" if diverged else f"{loss:>10}{validation:>12}"
        sys.stdout.write(f"{row['lr']:>10.3g}{factor:>8g}{rest}\n")
        sys.stdout.flush()
        finite += [] if diverged else [row]
    if not finite:
        raise ValueError("every training diverged; give smaller --factors or --lrs")
    by = "loss" if any(row["validation"] is None for row in finite) else "validation"
    best = min(finite, key=lambda row: row[by])
    word = "training loss" if by == "loss" else "validation loss"
    sys.stdout.write(f"\nLeast {word}; in {arguments.config}:\n{yaml.safe_dump(best['put'], sort_keys=False)}")


def _train(arguments: argparse.Namespace, printed: Mapping[str, Any], lr: float | None, factor: float) -> Any:
    """Run a training; return its results, and the section to put into the file for it."""
    strategy = printed["trainer"]["strategy"]
    if strategy == STRATEGY_NAME:
        strategy = {"class_path": "lightning_muon.ParallelMuonStrategy", "init_args": {"optimizer": "auto"}}
    given = strategy["init_args"].get("optimizer", "keep") if isinstance(strategy, dict) else "keep"
    if given == "keep" or (given != "auto" and given.get("base", "muon") != "muon"):
        raise ValueError(f"{arguments.config} trains without Muon: there is nothing to tune")
    optimizer, elsewhere = {"muon_lr_factor": factor}, dict[str, Any]()
    for section, key in _LEARNING_RATES if lr is not None else ():
        if ((printed.get(section) or {}).get("init_args") or {}).get(key) is not None:
            elsewhere[section] = {"init_args": {key: lr}}
            break
    else:
        optimizer |= {} if lr is None else {"lr": lr}
    merged = {**strategy["init_args"], "optimizer": ({} if given == "auto" else given) | optimizer}
    with tempfile.TemporaryDirectory() as folder:
        changes, result = Path(folder, "changes.yaml"), Path(folder, "result.json")
        init_args = {"result": str(result), "factor": factor, "lr": lr}
        limit = printed["trainer"].get("limit_val_batches")
        trainer = {
            **_TRAINER,
            "limit_val_batches": 20 if limit is None else limit,
            "max_steps": arguments.steps,
            "default_root_dir": folder,
            "strategy": {**strategy, "init_args": merged},
            "callbacks+": [{"class_path": f"{__name__}._Measure", "init_args": init_args}],
        }
        changes.write_text(yaml.safe_dump({"trainer": trainer, **elsewhere}), encoding="utf-8")
        found = json.loads(_fit("--config", arguments.config, "--config", str(changes), result=result))
    put = {"trainer": {"strategy": {**strategy, "init_args": {"optimizer": optimizer}}}, **elsewhere}
    return {**found, "put": put}


def _fit(*words: str, result: Path | None = None) -> str:
    """Run ``lightning-muon fit`` in its own processes; return what it prints, or what it writes to ``result``."""
    command = [sys.executable, "-m", "lightning_muon", "fit", *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if result is not None and result.is_file():
        return result.read_text(encoding="utf-8")
    if result is not None or ended.returncode:
        _, is_ours, message = ended.stderr.rpartition(_SAID_BY_FIT)
        has_traceback = "Traceback (most recent" in ended.stderr
        if is_ours and not has_traceback:
            raise ValueError(message.rstrip())
        said = ended.stderr.splitlines()[-40 if has_traceback else -12 :]
        raise ValueError("\n".join([f"fit {' '.join(words)} ended with {ended.returncode}:", *said]))
    return ended.stdout


class _Measure(_Callback):
    """Ends a training after its steps, without the callbacks that are turned off, and writes its results."""

    def __init__(self, result: str, factor: float, lr: float | None) -> None:
        self.result, self.factor, self.lr = Path(result), factor, lr
        self.losses: list[float] = []
        self.found: dict[str, Any] = {"lr": math.nan, "loss": math.nan, "validation": None}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        trainer.callbacks = [each for each in trainer.callbacks if not any(off in type(each).__name__ for off in _OFF)]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        factors = {group.get("muon_lr_factor") for each in trainer.optimizers for group in each.param_groups}
        self.found["lr"] = lr = trainer.optimizers[0].defaults["lr"]
        if self.factor not in factors:
            raise SystemExit(
                "muon_lr_factor has no effect: the program made a ParallelMuon itself, or its optimizer is kept"
            )
        if self.lr not in (None, lr):
            raise SystemExit(f"--lrs has no effect on the optimizer of the program, which has lr={lr}")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        self.losses.append(float(trainer.strategy.reduce(loss.detach(), reduce_op="mean")))
        trainer.should_stop = trainer.global_step >= trainer.max_steps or not math.isfinite(self.losses[-1])

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.before = dict(trainer.callback_metrics)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        metrics = trainer.callback_metrics.items()
        losses = [float(value) for key, value in metrics if "loss" in key and self.before.get(key) is not value]
        self.found["validation"] = losses[0] if losses else None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.found["loss"] = mean(self.losses[-max(1, len(self.losses) // 10) :])
        self._write(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if isinstance(exception, NonFiniteGradientError):  # Raised by every rank; the loss stays NaN.
            self._write(trainer)

    def _write(self, trainer: Any) -> None:
        if trainer.is_global_zero:
            self.result.write_text(json.dumps(self.found), encoding="utf-8")
