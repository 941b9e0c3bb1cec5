"""The command: ``lightning-muon convert`` and ``plan``, or LightningCLI with the strategy as the default.

LightningCLI runs ``lightning-muon fit|validate|test|predict --config FILE.yaml``.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_muon.cli.convert import convert_command
from lightning_muon.cli.plan import plan_command
from lightning_muon.cli.trace import trace_command
from lightning_muon.compat.lightning import LightningPackage, PackageName, metadata_filename
from lightning_muon.integrations.lightning.registry import STRATEGY_NAME

_PACKAGES: tuple[PackageName, ...] = ("lightning.pytorch", "pytorch_lightning")
_EPILOG = """Beside these: lightning-muon convert DIR FILE makes one file of a checkpoint directory; lightning-muon plan
shows who owns which matrix and predicts the time of a step; lightning-muon trace records real steps."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command.

    Models and data modules are named by ``class_path`` and found in the current directory, too. Everything that
    LightningCLI offers works: ``--print_config``, several ``--config``, overrides such as ``--trainer.max_epochs 3``,
    ``--optimizer`` and ``--lr_scheduler``. ``convert``, ``plan`` and ``trace`` are commands of our own.

    Args:
        args: In place of those of the process.
    """
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    words = list(sys.argv[1:] if args is None else args)
    if words[:1] == ["convert"]:
        convert_command(words[1:], metadata_name=metadata_filename(LightningPackage(_installed_package())))
    elif words[:1] == ["plan"]:
        plan_command(words[1:], cli_class=_lightning_cli)
    elif words[:1] == ["trace"]:
        trace_command(words[1:])
    else:
        make_cli(args, parser_kwargs={"epilog": _EPILOG})


def make_cli(args: Sequence[str] | None = None, **kwargs: Any) -> Any:
    """A LightningCLI with ``"parallel_muon"`` as the default strategy; runs the command that ``args`` name.

    Args:
        args: In place of those of the process.
        **kwargs: For LightningCLI.
    """
    return _lightning_cli()(
        trainer_defaults={"strategy": STRATEGY_NAME}, args=None if args is None else list(args), **kwargs
    )


def _lightning_cli() -> type[Any]:
    return importlib.import_module(f"{_installed_package()}.cli").LightningCLI


def _installed_package() -> PackageName:
    for package in _PACKAGES:
        if importlib.util.find_spec(package.partition(".")[0]) is not None:
            return package
    raise SystemExit("lightning-muon needs Lightning; pip install 'lightning-muon[lightning]'")


if __name__ == "__main__":
    main()
