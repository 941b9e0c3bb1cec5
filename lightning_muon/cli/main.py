"""The command ``lightning-muon``: one tree, whose commands are imported when they are called.

``fit``, ``validate``, ``test`` and ``predict`` are those of LightningCLI, with the strategy as the default.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from lightning_muon import __version__
from lightning_muon.config import nearest
from lightning_muon.errors import DamagedCheckpointError, UnknownOptionError
from lightning_muon.removed import removed

_PROG = "lightning-muon"
_LIGHTNING = {
    "fit": "train by a YAML file: LightningCLI with our strategy",
    "validate": "the same, over the validation data",
    "test": "the same, over the test data",
    "predict": "the same, for predictions",
}
# Each is a module of this folder, with `add_arguments` and `run`.
_COMMANDS = {
    "plan": "predict owners, bytes and time of a step, without a GPU",
    "tune": "short trainings with several learning rates of Muon",
    "convert": "make one file of a checkpoint, or a folder for transformers",
    "doctor": "say what is installed here, and what will not work",
    "verify": "find damage to checkpoints by the hashes of their files",
    "config": "write a config file for programs with Accelerate",
    "launch": "start a program of Accelerate with such a file",
}
_EXTRAS = {"config": "accelerate", "launch": "accelerate"}
_OPTIONAL = ("accelerate", "jsonargparse", "lightning", "matplotlib", "pytorch_lightning", "yaml")
# Packages that no extra is for: what to install instead.
_OTHERS = {"transformers": "transformers>=5", "huggingface_hub": "transformers>=5", "safetensors": "safetensors"}
# Lines in LightningCLI's message on a wrong value; those between have the key, the value and the allowed ones.
_NOISE = ("Does not validate", "Errors:", "Given value type:", "Given value: NestedArg", "Subtypes:")
_NOISE += ("- Expected a <class 'NoneType'>",)
_NO_CLASS = "Expected a dot import path string: parallel_muon"
_MOST_LINES = 11


def main(args: Sequence[str] | None = None) -> None:
    """Run the command; ``args`` replace those of the process.

    Models and data modules are named by ``class_path`` and found in the current directory, too. Everything that
    LightningCLI offers works: ``--print_config``, several ``--config``, overrides such as ``--trainer.max_epochs 3``,
    ``--optimizer`` and ``--lr_scheduler``. The other commands are our own; a failure ends them with a message.
    """
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    words = list(sys.argv[1:] if args is None else args)
    parser = ArgumentParser(prog=_PROG, description="Distributed Muon for Lightning and Accelerate.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    texts = (_LIGHTNING | _COMMANDS).items()
    parsers = {name: commands.add_parser(name, help=text, allow_abbrev=False) for name, text in texts}
    for each in (parser, *parsers.values()):
        reporting(each)
    name = words[0] if words else ""
    if name in _LIGHTNING or name.partition("=")[0] in ("-c", "--config"):
        lightning_cli(args)
    elif name in _COMMANDS:
        _run(name, parsers[name], words[1:])
    elif name.startswith("-") or not name:
        parser.parse_args(words)
    else:
        gone = removed(f"{_PROG} {name}")
        if gone is not None:
            parser.error(gone)
        meant = nearest(name, list(parsers))
        hint = f"did you mean {meant!r}?" if meant else f"the commands are {', '.join(parsers)}"
        parser.error(f"there is no command {name!r}; {hint}")


def _run(name: str, parser: ArgumentParser, words: Sequence[str]) -> None:
    try:
        module = importlib.import_module(f"lightning_muon.cli.{name}")
        if name == "launch":  # Whose options are those of Accelerate.
            module.launch_command(words)
        else:
            module.add_arguments(parser)
            words = [re.sub(r"^--[^=]+", lambda option: option[0].replace("_", "-"), word) for word in words]
            _check_options(parser, words)
            module.run(parser.parse_args(words))
    except ModuleNotFoundError as error:
        _refuse_missing(parser, error, _EXTRAS.get(name, "lightning"))
    except (OSError, ValueError, TypeError, ImportError, DamagedCheckpointError) as error:
        raise SystemExit(f"{parser.prog}: {error}") from error


def _check_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    """End the process at a wrong option first: argparse would instead complain of a missing one."""
    for option in (word.partition("=")[0] for word in words if word.startswith("--")):
        if option not in parser._option_string_actions:
            parser.error(removed(f"{parser.prog} {option}") or f"unrecognized arguments: {option}")


def _refuse_missing(parser: ArgumentParser, error: ModuleNotFoundError, extra: str) -> NoReturn:
    name = (error.name or "").partition(".")[0]
    extra = "plots" if name == "matplotlib" else extra
    wanted = f"lightning-muon[{extra}]" if name in _OPTIONAL else _OTHERS.get(name)
    parser.error(str(error) if wanted is None else f'{name} is not installed; pip install "{wanted}"')


def reporting(parser: Any) -> Any:
    """Return the parser, also one of jsonargparse, changed so that its errors do not print the usage."""
    parser.error = partial(_refuse, parser)
    return parser


def _refuse(parser: ArgumentParser, message: str, error: Exception | None = None) -> NoReturn:
    parser = getattr(error, "subcommand_parser", None) or parser
    _, is_unknown, unknown = message.partition("nrecognized arguments: ")
    if is_unknown:
        wrong = next((word for word in unknown.split() if word.startswith("-")), unknown)
        meant = nearest(wrong.partition("=")[0], list(parser._option_string_actions))
        message += f"; did you mean {meant}?" if meant else ""
    message = message.replace(
        _NO_CLASS, "For options give --trainer.strategy lightning_muon.ParallelMuonStrategy first"
    )
    lines = [line for line in message.splitlines() if not line.strip().startswith(_NOISE)]
    lines = [line if len(line) <= 300 else f"{line[:300]}..." for line in lines[:_MOST_LINES]]
    parser.exit(2, "{}: {}\n".format(parser.prog.replace(" [options]", ""), "\n".join(lines)))


def lightning_cli(args: Sequence[str] | None, *, callbacks: Sequence[Any] = (), **options: Any) -> Any:
    """Run the command in ``args`` with a LightningCLI whose default strategy is ``"parallel_muon"``; return the CLI.

    ``callbacks`` are added to those of the files; ``options`` are further arguments of LightningCLI.
    """
    try:
        import jsonargparse  # noqa: F401 - Lightning itself does not say how to install it.

        from lightning_muon.integrations.registry import STRATEGY_NAME, TRAINERS, first_installed

        package = first_installed(TRAINERS, "lightning-muon needs Lightning")
    except ModuleNotFoundError as error:
        _refuse_missing(reporting(ArgumentParser(prog=_PROG)), error, "lightning")

    class CLI(importlib.import_module(f"{package}.cli").LightningCLI):
        def init_parser(self, **kwargs: Any) -> Any:
            # A misspelt option is an error, even if it is the beginning of another one.
            return reporting(super().init_parser(allow_abbrev=False, **kwargs))

    _check_files(list(sys.argv[1:] if args is None else args))
    words = None if args is None else list(args)
    defaults = {"strategy": STRATEGY_NAME, "callbacks": list(callbacks)}
    return CLI(trainer_defaults=defaults, parser_kwargs={"prog": _PROG}, args=words, **options)


def _check_files(words: Sequence[str]) -> None:
    """End the process at a wrong key or strategy value in config files; LightningCLI's errors are hard to read."""
    from lightning_muon.cli.plan_model import read_fit_file
    from lightning_muon.engine.options import Options

    paths = [value for word, value in pairwise(words) if word in ("--config", "-c")]
    paths += [word.removeprefix("--config=") for word in words if word.startswith("--config=")]
    given, files = dict[str, Any](), list[str]()
    try:
        for path in filter(os.path.isfile, paths):  # All else is for LightningCLI to judge.
            strategy = read_fit_file(path)[1].get("strategy")
            if isinstance(strategy, dict) and str(strategy.get("class_path")).endswith("ParallelMuonStrategy"):
                given |= strategy.get("init_args") or {}
                files.append(path)
        Options.from_mapping(given, source=f"{', '.join(files)}: trainer.strategy")
    except ValueError as error:
        # The command line may replace values.
        if isinstance(error, UnknownOptionError) or not any(word.startswith("--trainer.strategy") for word in words):
            _refuse(ArgumentParser(prog=_PROG), str(error))
