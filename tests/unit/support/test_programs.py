"""Programs on forked processes: what they print, how they end, and what they find."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.programs import run_program

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
