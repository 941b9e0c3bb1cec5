"""The command ``lightning-muon``: one tree, whose commands are imported when they are called.

``fit``, ``validate``, ``test`` and ``predict`` are those of LightningCLI, with the strategy as the default.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import traceback
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from lightning_muon import __version__
from lightning_muon.config import nearest, no_option
from lightning_muon.errors import DamagedCheckpointError
from lightning_muon.removed import removed, removed_value

_PROG = "lightning-muon"
_LIGHTNING = {
    "fit": "train by a YAML file: LightningCLI with our strategy",
    "validate": "the same, over the validation data",
    "test": "the same, over the test data",
    "predict": "the same, for predictions",
}
# Each is a module of this folder, with `add_arguments` and `run`; `launch` has the options of Accelerate.
_COMMANDS = {
    "plan": "predict owners, bytes and time of a step, without a GPU",
    "convert": "make one file of a checkpoint of shards, or safetensors",
    "doctor": "say what is installed here, and what will not work",
    "verify": "find damage to checkpoints by the hashes of their files",
    "launch": "start a program of Accelerate, our options in its config",
}
# Package -> what brings it, if it is not the extra of the frameworks.
_BRINGS = {"matplotlib": "lightning-muon[plots]", "safetensors": "safetensors"}
_OF_FRAMEWORKS = ("accelerate", "jsonargparse", "lightning", "pytorch_lightning", "yaml")


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
        _run_lightning_cli(args)
    elif name in _COMMANDS:
        _run(name, parsers[name], words[1:])
    elif name.startswith("-") or not name:
        parser.parse_args(words)
    else:
        meant = nearest(name, list(parsers))
        hint = f"did you mean {meant!r}?" if meant else f"the commands are {', '.join(parsers)}"
        parser.error(removed(f"{_PROG} {name}") or f"there is no command {name!r}; {hint}")


def _run(name: str, parser: ArgumentParser, words: Sequence[str]) -> None:
    try:
        module = importlib.import_module(f"lightning_muon.cli.{name}")
        if name == "launch":
            module.launch_command(words)
            return
        module.add_arguments(parser)
        words = [re.sub(r"^--[^=]+", lambda option: option[0].replace("_", "-"), word) for word in words]
        # Wrong options first: argparse would instead complain of a missing one.
        for option in (word.partition("=")[0] for word in words if word.startswith("--")):
            if option not in parser._option_string_actions:
                parser.error(f"unrecognized arguments: {option}")
        module.run(parser.parse_args(words))
    except ModuleNotFoundError as error:
        _refuse_missing(parser, error, "accelerate" if name == "launch" else "lightning")
    except (OSError, ImportError, DamagedCheckpointError) as error:
        raise SystemExit(f"{parser.prog}: {error}") from error
    except ValueError as error:
        if not raised_by(error, "lightning_muon"):
            raise
        raise SystemExit(f"{parser.prog}: {error}") from error


def raised_by(error: Exception, *packages: str) -> bool:
    """Whether one of ``packages`` raises ``error`` itself; who reads the words of other code needs the traceback."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__", "").partition(".")[0] in packages


def _refuse_missing(parser: ArgumentParser, error: ModuleNotFoundError, extra: str) -> NoReturn:
    name = (error.name or "").partition(".")[0]
    wanted = f"lightning-muon[{extra}]" if name in _OF_FRAMEWORKS else _BRINGS.get(name)
    parser.error(str(error) if wanted is None else f'{name} is not installed; pip install "{wanted}"')


def reporting(parser: Any) -> Any:
    """The parser, also one of jsonargparse, changed: its errors print no usage, but the nearest name, and the file."""
    files = list[str]()
    parse_path: Any = getattr(parser, "parse_path", None)

    def parse_file(path: Any, *args: Any, **kwargs: Any) -> Any:
        files.append(f"{path}: ")
        parsed = parse_path(path, *args, **kwargs)
        files.pop()
        return parsed

    def refuse(message: str, error: Exception | None = None) -> None:
        of_command = getattr(error, "subcommand_parser", None) or parser
        prog, options = of_command.prog.replace(" [options]", ""), list(of_command._option_string_actions)
        of_command.exit(2, f"{prog}: {''.join(files)}{_explained(prog, message.rstrip(), options)}\n")

    parser.error = refuse
    if parse_path is not None:
        parser.parse_path = parse_file
    return parser


def _explained(prog: str, message: str, options: Sequence[str]) -> str:
    """Why a wrong option, or a wrong value, went; else the message, and what may be meant."""
    if wrong := re.search(r"nrecognized arguments: (?:\S+ )*?(-[^\s=]+)", message):
        meant = nearest(wrong[1], options)
        return removed(f"{prog} {wrong[1]}") or (f"{message}; did you mean {meant}?" if meant else message)
    if "Expected a dot import path string: parallel_muon" in message:
        return f"{message}\nFor options give --trainer.strategy lightning_muon.ParallelMuonStrategy first"
    is_ours = "class_path 'lightning_muon." in message
    if is_ours and (gone := removed_value(message)):
        return gone
    key = next(iter(re.findall(r"Option '(\w+)' is not accepted", message)), "")
    tried = re.findall(rf"class_path '((\S+)[.](\w+))':\s+(?:Option '|Parser key \"){key}['\"]", message)
    kinds = [getattr(importlib.import_module(module), name) for _, module, name in tried]
    options = list(dict.fromkeys(option for kind in kinds for option in inspect.signature(kind).parameters))
    if not kinds or key in options:  # One of the classes has it.
        return message
    path, _, name = tried[0]
    return (removed(key, name) if is_ours else None) or f"{message}\n{path}: {no_option(key, options)}"


def _run_lightning_cli(args: Sequence[str] | None) -> None:
    """A LightningCLI whose default strategy is ``"parallel_muon"``."""
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

    CLI(
        trainer_defaults={"strategy": STRATEGY_NAME},
        parser_kwargs={"prog": _PROG},
        args=None if args is None else list(args),
    )
