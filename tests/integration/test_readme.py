"""The programs in README.md, in docs/ and in docstrings run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_muon import DCTTopK, FlexDeMo, ParallelMuon

ROOT = Path(__file__).parents[2]


def _block(word: str, page: str = "README.md") -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    (found,) = [block for block in blocks if word in block]
    return found


@pytest.mark.timeout(120)
def test_the_plain_loop_runs_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_block("init_process_group"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    result = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "Muon: 2 tensors, 32,768 parameters (20.2%)" in result.stdout


@pytest.mark.timeout(120)
def test_the_plain_loop_with_flexdemo_and_a_replicator_of_ones_own_run_under_torchrun(tmp_path: Path) -> None:
    page = "docs/flexdemo.md"
    loop = _block("init_process_group", page)
    ours = loop.replace("DCTTopK(top_k=8)", "Largest(count=8)")
    assert ours != loop
    for name, program in (("loop", loop), ("own", _block("class Largest", page) + ours)):
        script = tmp_path / f"{name}.py"
        script.write_text(program)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
        result = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        assert "2 nodes" in result.stdout


_AROUND_A_MODE = """
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

torch.distributed.init_process_group()
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))

class Model(nn.Sequential):
    def forward(self, batch):
        return super().forward(batch).square().mean()

model = Model(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))
loader = torch.randn(5, 2, 4, 6)
{loop}
weights = [getattr(weight, "full_tensor", lambda: weight)() for weight in model.parameters()]
everyone = [None, None]
torch.distributed.all_gather_object(everyone, weights)
assert all(map(torch.equal, *everyone))
torch.distributed.destroy_process_group()
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["zero2", "fsdp"])
def test_a_mode_trains_without_lightning(tmp_path: Path, name: str) -> None:
    loop = _block("make_mode", "docs/gradients.md").replace('"zero2"', repr(name))
    script = tmp_path / "train.py"
    script.write_text(_AROUND_A_MODE.replace("{loop}", loop))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    result = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.timeout(120)
def test_the_one_line_trains_a_lightning_program(tmp_path: Path) -> None:
    program = """
    import torch
    from lightning.pytorch.demos.boring_classes import BoringModel as MyLightningModule, BoringDataModule

    {lines}
    """
    lines = _block('strategy="parallel_muon"').replace(
        "devices=8, num_nodes=2,", 'devices=2, accelerator="cpu", max_steps=3,'
    )
    lines = lines.replace("datamodule)", "BoringDataModule())")
    script = tmp_path / "fit.py"
    script.write_text(textwrap.dedent(program).format(lines=lines))
    result = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=_environment(), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "Optimizer: SGD, kept" in result.stdout + result.stderr


def _environment() -> dict[str, str]:
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {key: value for key, value in os.environ.items() if key not in launcher}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_the_example_of_parallel_muon_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = textwrap.dedent(re.search(r"Example::\n\n(.*?)\n\n    Args:", ParallelMuon.__doc__ or "", re.DOTALL)[1])  # type: ignore[index]
    exec(example, {"torch": torch, "nn": nn, "ParallelMuon": ParallelMuon})
    assert "1.weight" in capsys.readouterr().out


def test_the_example_of_flexdemo_runs() -> None:
    example = textwrap.dedent(re.search(r"Example::\n\n(.*?)\n\n    Args:", FlexDeMo.__doc__ or "", re.DOTALL)[1])  # type: ignore[index]
    names = {"torch": torch, "nn": nn, "FlexDeMo": FlexDeMo, "DCTTopK": DCTTopK}
    exec(example, names)
    assert names["optimizer"].num_exchanges == 1
