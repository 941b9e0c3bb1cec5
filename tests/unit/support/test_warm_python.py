"""The warm interpreter: arguments, files, environment and ends of its programs are those of the caller."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import program_environment
from tests.support.warm_python import warm_python

_PROGRAM = """
import atexit, os, sys
print(sorted({"torch", "lightning"} & sys.modules.keys()), __name__, sys.argv[1:], os.getcwd(), os.environ["OF_TEST"])
print(sys.stdin.read(), file=sys.stderr)
atexit.register(print, "at exit")
if sys.argv[1] == "raise":
    raise OSError("file 4")
sys.exit(int(sys.argv[1]))
"""
_SLEEPS = """
import os, time
print(os.getpid(), flush=True)
time.sleep(60)
"""
_STARTS_ITSELF = """
import subprocess, sys
print("torch" in sys.modules, len(sys.argv))
if len(sys.argv) == 1:
    sys.exit(subprocess.run([sys.executable, "-u", __file__, "inner"]).returncode + 3)
sys.exit(4)
"""


def _start(folder: Path, program: str, *words: str) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(program)
    options: dict[str, Any] = {"cwd": folder, "env": program_environment() | {"OF_TEST": "5"}, "text": True}
    command = [warm_python(), "-m", "program", *words]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, **pipes, **options)


@pytest.mark.parametrize(("word", "code"), [("0", 0), ("3", 3), ("raise", 1)])
def test_a_program_is_that_of_its_caller(tmp_path: Path, word: str, code: int) -> None:
    program = _start(tmp_path, _PROGRAM, word)
    output, errors = program.communicate("from the caller", timeout=60)
    assert program.returncode == code
    assert output == f"['lightning', 'torch'] __main__ ['{word}'] {tmp_path} 5\nat exit\n"
    assert errors.startswith("from the caller\n")
    assert ("OSError: file 4" in errors) is (word == "raise")


def test_a_program_starts_others_as_it_was_started(tmp_path: Path) -> None:
    program = _start(tmp_path, _STARTS_ITSELF)
    output, errors = program.communicate(timeout=60)
    assert program.returncode == 7, errors
    assert output == "True 1\nTrue 2\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_program_ends_with_its_caller(tmp_path: Path, number: signal.Signals) -> None:
    program = _start(tmp_path, _SLEEPS)
    assert program.stdout is not None
    pid = int(program.stdout.readline())
    assert pid != program.pid and _is_alive(pid)
    program.send_signal(number)
    assert program.wait(timeout=30) == -number
    assert program.stdout.read() == "", "ends when the program does"
    assert number == signal.SIGKILL or not _is_alive(pid)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
