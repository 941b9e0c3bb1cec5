"""The programs in docs/fabric.md and examples/fabric_loop.py run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.integration.integrations.fabric.loop import launch
from tests.integration.training import Block
from tests.support.processes import ProcessPool
from tests.support.programs import ROOT, program_environment, run_program
from tests.support.worker import free_port


def _documented(directory: str) -> tuple[str, list[Any]]:
    """The class of the optimizer, and whole weights before and after."""
    (program,) = [block for block in _blocks() if "fabric.launch()" in block]
    program = program.replace("devices=4", f"devices={dist.get_world_size()}").replace(
        '"checkpoint"', f'"{directory}/checkpoint"'
    )
    torch.manual_seed(0)
    rows = [(row, row.roll(1)) for row in torch.randn(32, 16)]
    initial: list[Any] = []

    def make_model() -> torch.nn.Module:
        model = torch.nn.Sequential(Block(), Block(), torch.nn.Linear(16, 16))
        initial.extend(parameter.detach().clone() for parameter in model.parameters())
        return model

    launch()  # Sets the environment of the pool's workers.
    names: dict[str, Any] = {"MyModel": make_model, "loader": DataLoader(rows, batch_size=4)}
    exec(program, names)
    after = [parameter.full_tensor() for parameter in names["model"].parameters()]
    changed = [not torch.equal(*pair) for pair in zip(initial, after, strict=True)]
    names["fabric"].strategy.teardown()
    return type(names["optimizer"].optimizer).__name__, changed


def _blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "fabric.md").read_text(), re.DOTALL)


def test_the_documented_loop_trains_and_saves(gloo: ProcessPool, tmp_path: Path) -> None:
    for optimizer, changed in gloo.run(_documented, str(tmp_path), world_size=2):
        assert optimizer == "ParallelMuon"
        assert all(changed)
    assert (tmp_path / "checkpoint" / "meta.pt").is_file()


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
