"""The command: ``lightning-muon launch``, ``config``, ``convert``, ``plan`` and ``trace``, or LightningCLI.

LightningCLI, with the strategy as the default, runs ``lightning-muon fit|validate|test|predict --config FILE.yaml``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_muon.cli.config import config_command
from lightning_muon.cli.convert import convert_command
from lightning_muon.cli.launch import launch_command
from lightning_muon.cli.plan import plan_command
from lightning_muon.cli.trace import trace_command
from lightning_muon.engine.options import Options
from lightning_muon.engine.parsing import read_yaml
from lightning_muon.errors import UnknownOptionError
from lightning_muon.integrations.registry import STRATEGY_NAME, TRAINERS, first_installed

_EPILOG = """Beside these: lightning-muon convert DIR FILE makes one file of a checkpoint directory; lightning-muon plan
shows who owns which matrix and predicts the time of a step; lightning-muon trace records real steps; lightning-muon
config writes a config file for programs with Accelerate, and lightning-muon launch starts them with it."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command; ``args`` come in place of those of the process.

    Models and data modules are named by ``class_path`` and found in the current directory, too. Everything that
    LightningCLI offers works: ``--print_config``, several ``--config``, overrides such as ``--trainer.max_epochs 3``,
    ``--optimizer`` and ``--lr_scheduler``. The other commands are our own; a failure ends them with a message.
    """
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    words = list(sys.argv[1:] if args is None else args)
    command = _COMMANDS.get(words[0]) if words else None
    if command is None:
        _check_strategy_options(words)
        make_cli(args, parser_kwargs={"epilog": _EPILOG})
        return
    try:
        command(words[1:])
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise SystemExit(f"lightning-muon {words[0]}: {error}") from error


def _check_strategy_options(words: Sequence[str]) -> None:
    """End the process where a config file has a wrong key, with the nearest right one, which LightningCLI does not."""
    values = [value for word, value in pairwise(words) if word in ("--config", "-c")]
    for path in (*values, *(word.removeprefix("--config=") for word in words if word.startswith("--config="))):
        try:
            strategy = (read_yaml(path).get("trainer") or {}).get("strategy")
            if isinstance(strategy, dict) and str(strategy.get("class_path")).endswith("ParallelMuonStrategy"):
                Options.from_mapping(strategy.get("init_args") or {}, source=f"{path}: trainer.strategy")
        except UnknownOptionError as error:
            raise SystemExit(f"lightning-muon: {error}") from error
        except (OSError, ValueError, AttributeError, ImportError):
            pass  # Values, and what is no file of options at all, are for LightningCLI to judge.


_COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "config": config_command,
    "convert": convert_command,
    "launch": launch_command,
    "plan": plan_command,
    "trace": trace_command,
}


def make_cli(args: Sequence[str] | None = None, **kwargs: Any) -> Any:
    """A LightningCLI with ``"parallel_muon"`` as the default strategy; runs the command that ``args`` name."""
    try:
        package = first_installed(TRAINERS, "lightning-muon needs Lightning")
    except ImportError as error:
        raise SystemExit(str(error)) from error
    cli_class = importlib.import_module(f"{package}.cli").LightningCLI
    return cli_class(trainer_defaults={"strategy": STRATEGY_NAME}, args=None if args is None else list(args), **kwargs)


if __name__ == "__main__":
    main()
