"""``lightning-muon tune``: short trainings by a config file, with several values of ``muon_lr_factor``."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar

import yaml

from lightning_muon.cli.main import make_cli
from lightning_muon.cli.plan_model import count
from lightning_muon.config import MuonConfig
from lightning_muon.errors import NonFiniteGradientError

_DESCRIPTION = """Train as fit --config FILE does, a few steps with each factor, always from the same seed; without
logger, checkpoints and early stopping. Prints the mean loss of the last tenth of the steps, the validation loss after
them, and what to put into FILE."""
# Callbacks that need what is off.
_OFF = ("Checkpoint", "EarlyStopping", "Monitor", "ProgressBar")
_LEARNING_RATES = ("optimizer.init_args.lr", "model.init_args.lr", "model.init_args.learning_rate")
_TRAINER = {
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    "min_epochs": None,
    "max_epochs": -1,
    "min_steps": None,
    "num_sanity_val_steps": 0,
    "val_check_interval": 1.0,
    "check_val_every_n_epoch": 10**9,  # Never: there is one validation at the end.
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description, add = _DESCRIPTION, parser.add_argument
    add("--config", required=True, metavar="FILE", help="a file of lightning-muon fit")
    add("--factors", type=float, nargs="+", default=[1.0, 2.0, 3.0, 5.0, 8.0], help="default: 1 2 3 5 8")
    add("--lrs", type=float, nargs="+", default=[None], help="learning rates (default: that of the program)")
    add("--steps", type=count, default=100, help="optimizer steps of each training (default: %(default)s)")


def run(arguments: argparse.Namespace) -> None:
    """Train with every pair of values, one after the other, and print the table."""
    finite: list[dict[str, Any]] = []
    sys.stdout.write(f"{'lr':>10}{'factor':>8}{'loss':>10}{'validation':>12}\n")
    for lr, factor in ((lr, factor) for lr in arguments.lrs for factor in arguments.factors):
        MuonConfig(muon_lr_factor=factor, lr=MuonConfig.lr if lr is None else lr)  # Raises for wrong values.
        row = _train(config=arguments.config, lr=lr, factor=factor, steps=arguments.steps)
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


def _train(**choice: Any) -> dict[str, Any]:
    """What came of a training, in processes of its own: Lightning starts the further ranks with the same command."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "lightning_muon.cli.tune", json.dumps(choice | {"result": str(result)})]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode or not result.is_file():
            said = ended.stderr.splitlines()[-40 if "Traceback (most recent" in ended.stderr else -3 :]
            raise ValueError("\n".join([f"the training with {choice} ended with {ended.returncode}:", *said]))
        return json.loads(result.read_text())


class _Tuned:
    """What the LightningCLI of ``fit`` does beside it."""

    choice: ClassVar[dict[str, Any]] = json.loads(sys.argv[1]) if __name__ == "__main__" else {}
    found: ClassVar[dict[str, Any]] = {"lr": math.nan, "loss": math.nan, "validation": None}
    config: Any
    trainer: Any
    model: Any
    datamodule: Any

    def before_instantiate_classes(self) -> None:
        config, lr = self.config.fit, self.choice["lr"]
        self.place = next((place for place in _LEARNING_RATES if config.get(place) is not None), "")
        if lr is not None and self.place:
            config[self.place] = lr
        trainer = config.trainer
        for key, value in (_TRAINER | {"max_steps": self.choice["steps"]}).items():
            trainer[key] = value
        trainer.limit_val_batches = 20 if trainer.limit_val_batches is None else trainer.limit_val_batches
        callbacks = trainer.callbacks if isinstance(trainer.callbacks, list) else [trainer.callbacks]
        trainer.callbacks = [each for each in callbacks if each and not any(word in each.class_path for word in _OFF)]

    def before_fit(self) -> None:
        strategy, lr = self.trainer.strategy, self.choice["lr"]
        given: Any = getattr(getattr(strategy, "options", None), "optimizer", "keep")
        if given == "keep" or getattr(given, "base", "muon") != "muon":
            raise SystemExit(f"{self.choice['config']} trains without Muon: there is nothing to tune")
        put = {"muon_lr_factor": self.choice["factor"]} | ({"lr": lr} if lr is not None and not self.place else {})
        config = replace(MuonConfig() if given == "auto" else given, **put)
        strategy.options = replace(strategy.options, optimizer=config)
        name = f"{type(strategy).__module__}.{type(strategy).__name__}"
        self.found["put"] = {"trainer": {"strategy": {"class_path": name, "init_args": {"optimizer": put}}}}
        if lr is not None and self.place:
            section, arguments, key = self.place.split(".")
            self.found["put"][section] = {arguments: {key: lr}}
        self.losses: list[float] = []
        callbacks = importlib.import_module(type(self.trainer).__module__.partition(".trainer.")[0] + ".callbacks")
        self.trainer.callbacks.append(
            callbacks.LambdaCallback(on_train_start=self._begin, on_train_batch_end=self._note)
        )

    def _begin(self, trainer: Any, _: Any) -> None:
        self.validates = trainer.enable_validation
        factors = {group.get("muon_lr_factor") for each in trainer.optimizers for group in each.param_groups}
        self.found["lr"] = lr = trainer.optimizers[0].defaults["lr"]
        if self.choice["factor"] not in factors:
            raise SystemExit(
                "muon_lr_factor has no effect: the program made a ParallelMuon itself, or its optimizer is kept"
            )
        if self.choice["lr"] not in (None, lr):
            raise SystemExit(f"--lrs has no effect on the optimizer of the program, which has lr={lr}")

    def _note(self, trainer: Any, _: Any, outputs: Any, *__: Any) -> None:
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        self.losses.append(float(trainer.strategy.reduce(loss.detach(), reduce_op="mean")))
        trainer.should_stop = not math.isfinite(self.losses[-1])

    def after_fit(self) -> None:
        self.found["loss"] = mean(self.losses[-max(1, len(self.losses) // 10) :])
        if self.validates and math.isfinite(self.found["loss"]):
            (metrics, *_) = self.trainer.validate(self.model, self.datamodule, verbose=False)
            self.found["validation"] = next((value for key, value in metrics.items() if "loss" in key), None)


def _main() -> None:
    with suppress(NonFiniteGradientError):  # Raised by every rank; the loss stays NaN.
        make_cli(["fit", "--config", _Tuned.choice["config"]], (_Tuned,), save_config_callback=None)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        Path(_Tuned.choice["result"]).write_text(json.dumps(_Tuned.found))


if __name__ == "__main__":
    _main()
