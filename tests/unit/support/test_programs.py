"""What tests can rely on: checks of shapes, a time limit, and programs on forked processes that end as their own do."""

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch

from lightning_muon.math import newton_schulz
from tests.support.programs import ROOT, is_alive, program_environment, run_program
from tests.support.warm_python import warm_python


def test_shapes_in_the_annotations_of_the_maths_are_checked() -> None:
    with pytest.raises(jaxtyping.TypeCheckError):
        newton_schulz.orthogonalize(torch.zeros(3), steps=((1.0, 1.0, 1.0),), eps=1e-7, compute_dtype=torch.float32)


def test_a_test_that_hangs_is_ended_by_its_time_limit(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    assert 0 < float(request.config.getini("timeout")) <= 180
    hanging = tmp_path / "test_hanging.py"
    hanging.write_text("import time\n\ndef test_it():\n    time.sleep(60)\n")
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "--timeout", "1", str(hanging)],
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Timeout" in done.stdout


_PROGRAM = """
import atexit, os, sys
from beside import WORD
import torch.distributed as dist

atexit.register(print, "at exit")
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, rank)
    dist.destroy_process_group()
    sys.exit(sys.argv[2] if sys.argv[1] == str(rank) else None)
print(WORD, __name__, sys.argv[1:], os.getcwd())
raise SystemExit(3)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("WORD = 'beside'")
    path = tmp_path / "program.py"
    path.write_text(_PROGRAM)
    return path


def test_a_program_runs_in_its_folder_and_its_exit_code_counts(script: Path) -> None:
    with pytest.raises(AssertionError, match=r"exit codes \[3\]") as failed:
        run_program(script, "--flag", directory=script.parent)
    assert re.search(rf"beside __main__ \['--flag'\] {script.parent}\nat exit", str(failed.value))


def test_ranks_meet_and_one_that_fails_is_told(script: Path) -> None:
    assert run_program(script, "none", directory=script.parent, num_ranks=3).count("at exit") == 3
    with pytest.raises(AssertionError, match=r"exit codes \[0, 1\]"):
        run_program(script, "1", "wrong", directory=script.parent, num_ranks=2)


def test_a_program_that_hangs_is_ended(tmp_path: Path) -> None:
    (tmp_path / "hang.py").write_text("import time; print('here', flush=True); time.sleep(60)")
    with pytest.raises(AssertionError, match=r"exit codes \[None\] \(None: not in 2 s\)\nhere"):
        run_program(tmp_path / "hang.py", directory=tmp_path, timeout=2.0)


_ENDS = """
import atexit, os, sys
print(sorted({"torch", "lightning"} & sys.modules.keys()), __name__, sys.argv[1:], os.getcwd(), os.environ["OF_TEST"])
print(sys.stdin.read(), file=sys.stderr)
atexit.register(lambda: print("at exit", repr(getattr(sys, "last_value", None))))
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


def _start(folder: Path, program: str, *words: str, python: str = "") -> subprocess.Popen[str]:
    (folder / "program.py").write_text(program)
    options: dict[str, Any] = {"cwd": folder, "env": program_environment() | {"OF_TEST": "5"}, "text": True}
    command = [python or warm_python(), "-m", "program", *words]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, **pipes, **options)


@pytest.mark.parametrize(("word", "code"), [("0", 0), ("3", 3), ("raise", 1)])
def test_a_program_is_that_of_its_caller(tmp_path: Path, word: str, code: int) -> None:
    program = _start(tmp_path, _ENDS, word)
    output, errors = program.communicate("from the caller", timeout=60)
    assert program.returncode == code
    assert output.startswith("['lightning', 'torch'] ")
    real = _start(tmp_path, _ENDS, word, python=sys.executable).communicate("", timeout=60)[0]
    assert real.startswith(f"[] __main__ ['{word}'] {tmp_path} 5\nat exit {'OSError' if word == 'raise' else 'None'}")
    assert output.partition("]")[2] == real.partition("]")[2]
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
    assert pid != program.pid and is_alive(pid)
    program.send_signal(number)
    assert program.wait(timeout=30) == -number
    assert program.stdout.read() == "", "ends when the program does"
    assert number == signal.SIGKILL or not is_alive(pid)
