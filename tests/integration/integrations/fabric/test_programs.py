"""examples/fabric_loop.py runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch

from tests.support.programs import ROOT, program_environment, run_program
from tests.support.worker import free_port


def test_the_example_learns_and_leaves_a_checkpoint(tmp_path: Path) -> None:
    words = (ROOT / "examples" / "fabric_loop.py", "--directory", tmp_path, "--steps", "40", "--devices", "2")
    text = run_program(*words, directory=ROOT, num_ranks=2)
    (loss,) = re.findall(r"step 40 loss ([\d.]+)", text)
    assert float(loss) < 1.0, "an untrained model has log(32) = 3.5"
    assert text.count("AdamW -> ParallelMuon") == 1
    saved = torch.load(tmp_path / "checkpoint" / "meta.pt")
    assert saved["step"] == saved["scheduler"]["last_epoch"] == 40


_FAILS = """
import torch.distributed as dist
from tests.integration.integrations.fabric import loop
dist.init_process_group("gloo")
fabric = loop.launch(sharding="zero2")
network = loop.network()
model, optimizer = fabric.setup(network, loop.adamw(network))
loop.run_steps(fabric, model, optimizer, steps=range(2))
if fabric.global_rank == 0:
    raise OSError("file 4")
loop.run_steps(fabric, model, optimizer, steps=range(2, 4))
"""


def test_an_exception_of_a_rank_is_the_last_error_of_all() -> None:
    """It is rank 0, whose process serves the store; only a process that really ends knows of such an exception."""
    sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    common = program_environment() | sizes | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", _FAILS],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [program.communicate(timeout=100)[1].strip().splitlines() for program in programs]
    assert all(program.returncode for program in programs)
    assert errors[0][-1].endswith("OSError: file 4")
    assert errors[1][-1].endswith("rank 0 has failed: OSError: file 4")
