"""Programs with ``AutoResume`` whose ranks are killed, or that are told to end, have the losses of a whole run.

The launchers are ``torchrun --max-restarts`` and the Trainer's own.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.programs import ROOT, is_alive, program_environment

_PROGRAM = f"""
import os, runpy, sys
sys.stdout = open(1, "w", buffering=1, closefd=False)  # Lines of the ranks stay whole, also unbuffered (-u).
with open("pids", "a") as file:
    file.write(str(os.getpid()) + " ")
runpy.run_path({str(ROOT / "examples" / "restarts.py")!r}, run_name="__main__")
"""
_NUM_STEPS = 9
_TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")


def _start(folder: Path, *launcher: str, kill_at: int = -1, pause: float = 0.0) -> subprocess.Popen[str]:
    """The program of examples/restarts.py, in a folder of its own."""
    program = folder / "program.py"
    program.write_text(_PROGRAM)
    options = ("--steps", _NUM_STEPS, "--seconds-per-step", pause, "--kill-at", kill_at)
    return subprocess.Popen(
        [sys.executable, *launcher, str(program), *map(str, options)],
        cwd=folder,
        env=program_environment() | {"PYTHONUNBUFFERED": ""},  # As above, in ranks that a Trainer starts.
        stdout=(folder / "printed").open("a"),
        stderr=subprocess.PIPE,
        text=True,
    )


def _losses(folder: Path) -> list[list[str]]:
    """What each rank has printed in all attempts."""
    lines = (folder / "printed").read_text().splitlines()
    return [[line for line in lines if line.startswith(f"rank {rank}, step")] for rank in range(2)]


def _end(started: subprocess.Popen[str], folder: Path, code: int = 0) -> list[list[str]]:
    """The losses of both ranks, once the program has ended with this code."""
    _, errors = started.communicate(timeout=150)
    assert started.returncode == code, errors[-3000:]
    deadline = time.monotonic() + 5
    while any(is_alive(int(pid)) for pid in (folder / "pids").read_text().split()):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.05)
    return _losses(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The losses of a run that nobody ends."""
    folder = tmp_path_factory.mktemp("whole")
    return _end(_start(folder), folder)


def test_killed_ranks_come_back_with_equal_bits(whole: list[list[str]], tmp_path: Path) -> None:
    broken = _end(_start(tmp_path, *_TORCHRUN, "--max-restarts=2", kill_at=6), tmp_path)
    for before, after in zip(whole, broken, strict=True):
        again = _NUM_STEPS - 4  # The example saves every 4 steps.
        assert len(before) == _NUM_STEPS and after[-again:] == before[-again:] and set(after) == set(before)


@pytest.mark.parametrize(
    ("launcher", "number", "code"),
    [(_TORCHRUN, signal.SIGTERM, 1), ((), signal.SIGTERM, 143), ((), signal.SIGINT, 130)],
    ids=["torchrun", "SIGTERM", "Ctrl-C"],
)
def test_a_launcher_that_is_told_to_end_saves(
    whole: list[list[str]], tmp_path: Path, launcher: tuple[str, ...], number: int, code: int
) -> None:
    started = _start(tmp_path, *launcher, pause=0.3)
    while not all(_losses(tmp_path)):
        assert started.poll() is None
        time.sleep(0.05)
    started.send_signal(number)
    told = _end(started, tmp_path, code)
    assert all(0 < len(losses) < _NUM_STEPS for losses in told)
    assert _end(_start(tmp_path), tmp_path) == whole, "no step is lost or run again"
