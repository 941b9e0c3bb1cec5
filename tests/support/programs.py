"""Run programs as torchrun runs them, on processes that have imported torch and Lightning already.

Importing them takes longer than what most programs of the tests do then. What is about the start itself, or starts
others as launchers do, needs ``subprocess`` and a real interpreter.
"""

import atexit
import faulthandler
import multiprocessing
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.worker import free_port, redirect_output

ROOT = Path(__file__).parents[2]
STARTED: list[str] = []  # What this process has run; tests/conftest.py counts it.
_OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_program(
    *words: str | Path, directory: Path, num_ranks: int = 1, num_nodes: int = 1, timeout: float = 120.0
) -> str:
    """Run a script, or ``"-m"`` and a module, with its arguments; what all ranks printed.

    A single rank gets no environment of a launcher. With ``num_nodes`` each has ``num_ranks / num_nodes`` of the ranks.
    """
    STARTED.append(" ".join(map(str, words)))
    context = multiprocessing.get_context("forkserver")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="program-") as logs:
        log = Path(logs, "output")
        log.touch()
        ranks = [
            context.Process(target=_run, args=(list(map(str, words)), str(directory), environment, str(log)))
            for environment in _environments(num_ranks, num_nodes, port)
        ]
        try:
            deadline = time.monotonic() + timeout
            for process in ranks:
                process.start()
            for process in ranks:
                process.join(max(0.0, deadline - time.monotonic()))
            codes = [process.exitcode for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.join()
        text = log.read_text(errors="replace")
    assert codes == [0] * num_ranks, f"exit codes {codes} (None: not in {timeout:g} s)\n{text[-10_000:]}"
    return text


def fit(config: Path, options: Mapping[str, object]) -> str:
    """Run ``lightning-muon fit`` on two CPU processes, as :func:`run_program` does."""
    on_cpus = {"accelerator": "cpu", "devices": 2, "precision": 32, "enable_progress_bar": "false"}
    options = {f"trainer.{key}": value for key, value in on_cpus.items()} | dict(options)
    words = [f"--{key}={value}" for key, value in options.items()]
    return run_program("-m", "lightning_muon", "fit", "--config", config, *words, directory=ROOT, num_ranks=2)


def program_environment() -> dict[str, str]:
    """The environment of a program that a user starts, in the checkout and with one thread."""
    kept = {key: value for key, value in os.environ.items() if key not in _OF_LAUNCHERS}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _environments(num_ranks: int, num_nodes: int, port: int) -> list[dict[str, str]]:
    """As torchrun sets them."""
    if num_ranks == 1:
        return [program_environment()]
    on_node, environments = num_ranks // num_nodes, list[dict[str, str]]()
    for rank in range(num_ranks):
        values = [rank, rank % on_node, num_ranks, on_node, "127.0.0.1", port]
        launched = {key: str(value) for key, value in zip(_OF_LAUNCHERS, values, strict=True)}
        launched |= {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": str(rank // on_node)}
        environments.append(program_environment() | launched)
    return environments


def _run(words: Sequence[str], directory: str, environment: Mapping[str, str], log: str) -> None:
    """Run what ``python`` would run with these words, in a child, and end it as that would."""
    redirect_output(log)
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    code = 0
    try:
        if words[0] == "-m":
            sys.argv = [words[1], *words[2:]]
            sys.path.insert(0, directory)
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(words)
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        if exit_.code is not None and not isinstance(exit_.code, int):
            sys.stderr.write(f"{exit_.code}\n")
    except BaseException:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(*sys.exc_info())
        code = 1
    # A child of multiprocessing leaves them out.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def is_alive(pid: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
