"""Ray Train on a local cluster, with a worker that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.programs import ROOT, program_environment

pytest.importorskip("ray")


@pytest.mark.timeout(600)
def test_a_killed_worker_comes_back_with_equal_bits(tmp_path: Path) -> None:
    program = (sys.executable, ROOT / "examples" / "ray_train.py", "--folder", tmp_path, "--kill-at", "6")
    environment = program_environment() | {"RAY_USAGE_STATS_ENABLED": "0"}
    with (tmp_path / "printed").open("w+") as printed:
        ran = subprocess.Popen(
            [*map(str, program)], env=environment, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = ran.wait(timeout=580)
        finally:
            with suppress(ProcessLookupError):  # Ray's servers, if the program has not come to its end.
                os.killpg(ran.pid, signal.SIGTERM)
        printed.seek(0)
        assert code == 0, printed.read()[-3000:]
    for rank in range(2):
        lines = (tmp_path / f"losses_{rank}").read_text().splitlines()
        steps = [int(line.removeprefix("step ").partition(":")[0]) for line in lines]
        # The checkpoint is of step 4; rank 0 may have seen step 6 before rank 1 was killed in it.
        assert steps[-8:] == [*range(4, 12)] and steps[:-8] == [*range(len(steps) - 8)] and len(steps) >= 14
        assert len(set(lines)) == 12, "the steps that are run again have the same losses"
