"""``lightning-muon launch``: ``accelerate launch`` with a file that has our options, too, for unchanged scripts."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wrapt import register_post_import_hook

from lightning_muon.cli.main import raised_by, reporting
from lightning_muon.compat.transformers import make_folders_first
from lightning_muon.engine.options import SECTION, Options, read_yaml

RUNNER = "lightning_muon.cli.launch"
_HELP = """lightning-muon launch [--config_file FILE] [arguments of accelerate launch] SCRIPT [arguments of SCRIPT]

Starts an unchanged script of Accelerate, or of the transformers Trainer, in which accelerate.Accelerator is
lightning_muon.accelerate.Accelerator. FILE is a config of Accelerate with a section `lightning_muon:` for our options,
such as examples/accelerate.yaml. Everything else is as in `accelerate launch`:
"""


def launch_command(words: Sequence[str]) -> None:
    """Run ``lightning-muon launch``; a wrong option ends the process with a message."""
    from accelerate.commands.launch import launch_command as launch
    from accelerate.commands.launch import launch_command_parser

    from lightning_muon.compat.accelerate import launch_on_cpus
    from lightning_muon.integrations.accelerate.settings import read_options

    parser = reporting(launch_command_parser())
    parser.prog, parser.usage = "lightning-muon launch", _HELP
    arguments = parser.parse_args(list(words))
    given = arguments.config_file
    try:
        # Values of Accelerate's config, and of the command line, which outweighs it.
        told = {} if given is None else read_yaml(given)
        told |= {key: value for key, value in vars(arguments).items() if value is not None}
        with split_config(given) as config_file:
            arguments.config_file = config_file
            processes, machines = told.get("num_processes"), told.get("num_machines") or 1
            for key, number in (("num_processes", processes or 1), ("num_machines", machines)):
                if not isinstance(number, int):
                    raise ValueError(f"{key} must be a whole number, got {number!r}")
            if processes and processes % machines == 0:  # The mesh is checked before any process starts.
                read_options(None).resolve(num_nodes=machines, num_processes=processes // machines)
            if not (arguments.module or arguments.no_python or Path(arguments.training_script).is_file()):
                raise FileNotFoundError(f"there is no script {arguments.training_script}")
            run_by_us(arguments)
            # mpirun starts its processes itself.
            on_cpus = (told.get("cpu") or told.get("use_cpu")) and told.get("mpirun_hostfile") is None
            (launch_on_cpus if on_cpus and (processes or 1) > 1 else launch)(arguments)
    except (ValueError, FileNotFoundError) as error:
        if not raised_by(error, "lightning_muon", "accelerate"):
            raise
        # The user does not know the temporary file.
        text = str(error).replace(str(arguments.config_file), str(given))
        where = f"{given}: " if given is not None and str(given) not in text else ""
        raise SystemExit(f"lightning-muon launch: {where}{text}") from error


@contextmanager
def split_config(path: str | None) -> Generator[str | None]:
    """Context in which ``LIGHTNING_MUON_CONFIG`` names ``path`` if it has our section; yields a file for Accelerate."""
    content = {} if path is None else read_yaml(path)
    if path is None or SECTION not in content:
        yield path
        return
    import yaml  # Comes with accelerate.

    from lightning_muon.integrations.accelerate.settings import CONFIG_VARIABLE

    Options.from_file(path)  # A wrong key raises here, before any process starts, with the name of the file.
    if other := os.environ.get(CONFIG_VARIABLE):
        raise ValueError(f"{path} has a section {SECTION}, and {CONFIG_VARIABLE} names {other}; use one of them")
    with tempfile.TemporaryDirectory(prefix="lightning-muon-") as directory:
        rest = Path(directory, "accelerate.yaml")
        rest.write_text(yaml.safe_dump({key: content[key] for key in content if key != SECTION}), encoding="utf-8")
        os.environ[CONFIG_VARIABLE] = str(Path(path).resolve())
        try:
            yield str(rest)
        finally:
            del os.environ[CONFIG_VARIABLE]


def run_by_us(arguments: Any) -> None:
    """Change ``arguments`` so that our runner starts the script that they name."""
    if arguments.no_python:
        raise ValueError(
            f"--no_python starts {arguments.training_script} itself, in which accelerate.Accelerator cannot be "
            "replaced; start a Python script, or use lightning_muon.accelerate.Accelerator and `accelerate launch`"
        )
    script = ["-m"] if arguments.module else []
    arguments.training_script_args = [*script, arguments.training_script, *arguments.training_script_args]
    arguments.training_script, arguments.module = RUNNER, True


def run_script(words: Sequence[str] | None = None) -> None:
    """Run ``[-m] SCRIPT [arguments]``, by default the words of the process, as ``python`` itself would."""
    words = list(sys.argv[1:] if words is None else words)
    is_module = words[:1] == ["-m"]
    del words[: int(is_module)]
    if not words:
        raise SystemExit("usage: python -m lightning_muon.cli.launch [-m] SCRIPT [arguments of SCRIPT]")
    replace_accelerator()
    sys.argv[:] = words
    if is_module:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        return
    # Replaces the current directory, which `python -m` has put there.
    sys.path[0] = str(Path(words[0]).resolve().parent)
    runpy.run_path(words[0], run_name="__main__")


def replace_accelerator() -> None:
    """Let ``from accelerate import Accelerator`` and Trainers of transformers use our class."""
    ours = "lightning_muon.integrations.accelerate.accelerator"

    def in_accelerate(package: Any) -> None:
        package.Accelerator = package.accelerator.Accelerator = importlib.import_module(ours).Accelerator

    def in_trainer(module: Any) -> None:
        module.Accelerator = importlib.import_module(ours).TrainerAccelerator
        make_folders_first(module.Trainer)

    register_post_import_hook(in_accelerate, "accelerate")
    register_post_import_hook(in_trainer, "transformers.trainer")


if __name__ == "__main__":
    run_script()
