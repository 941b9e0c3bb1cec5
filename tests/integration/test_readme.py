"""The programs in README.md, in docs/ and in docstrings run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import lightning_muon
from lightning_muon import FlexDeMo, Options, ParallelMuon, full_state_dict
from tests.integration.training import max_difference
from tests.reference.muon_and_adamw import MuonAndAdamW
from tests.support.processes import ProcessPool
from tests.support.programs import ROOT, program_environment, run_program


def _block(word: str, page: str = "README.md") -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    (found,) = [block for block in blocks if word in block]
    return found


@pytest.mark.timeout(120)
def test_the_plain_loop_runs_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_block("init_process_group"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    result = subprocess.run(command, cwd=ROOT, env=program_environment(), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "Muon: 2 tensors, 32,768 parameters (20.2%)" in result.stdout
    assert (ROOT / "examples" / "plain_loop.py").read_text().endswith(script.read_text())


def _train_plainly(seed: int) -> dict[str, torch.Tensor]:
    """The example's ``train``; each rank has some of the tokens of each batch. Whole weights on rank 0."""
    from examples.plain_loop import train

    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = _model(seed)
    with mock.patch("lightning_muon.optim.planned_optimizer.cpu_multiplies_bfloat16_fast", return_value=False):
        train(model, [batch.chunk(size)[rank] for batch in _batches(seed)])
    return full_state_dict(model)


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(30, 13), nn.Linear(13, 7), nn.GELU(), nn.Linear(7, 11), nn.Linear(11, 30))


def _batches(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(30, (12,), generator=generator) for _ in range(8)]


def test_the_plain_loop_makes_the_weights_of_one_process(gloo: ProcessPool) -> None:
    seed = int(torch.randint(10**6, ()))
    model = _model(seed)
    optimizer = MuonAndAdamW(model, ["1.weight", "3.weight"], lr=1e-3)
    for step, tokens in enumerate(_batches(seed)):
        rate = 1e-3 * (1 / 3 + (1 - 1 / 3) * min(step / 5, 1))
        optimizer.muon.lr = optimizer.adamw.param_groups[0]["lr"] = rate
        nn.functional.cross_entropy(model(tokens), tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
    (weights, *_) = gloo.run(_train_plainly, seed, world_size=3)
    # Float32 sums in another order, through 8 steps of AdamW, which makes much of the last digit of a gradient near 0.
    assert max_difference(weights, dict(model.state_dict())) < 5e-5, f"seed {seed}"


def test_the_plain_loop_with_a_replicator_of_ones_own_runs(tmp_path: Path) -> None:
    page = "docs/flexdemo.md"
    loop = _block("init_process_group", page)
    ours = loop.replace("DCTTopK(top_k=8)", "Largest(count=8)")
    assert ours != loop
    for name, program in (("loop", loop), ("own", _block("class Largest", page) + ours)):
        script = tmp_path / f"{name}.py"
        script.write_text(program)
        assert "2 nodes" in run_program(script, directory=ROOT, num_ranks=2)


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


@pytest.mark.parametrize("name", ["zero2", "fsdp"])
def test_a_mode_trains_without_lightning(tmp_path: Path, name: str) -> None:
    loop = _block("make_mode", "docs/gradients.md").replace('"zero2"', repr(name))
    script = tmp_path / "train.py"
    script.write_text(_AROUND_A_MODE.replace("{loop}", loop))
    run_program(script, directory=ROOT, num_ranks=2)


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
    assert "Optimizer: SGD, kept" in run_program(script, directory=tmp_path, num_ranks=2)


@pytest.mark.parametrize("documented", [ParallelMuon, FlexDeMo, Options])
def test_the_example_of_a_class_runs(capsys: pytest.CaptureFixture[str], documented: type) -> None:
    example = textwrap.dedent(re.search(r"Example::\n\n(.*?)\n\n    Args:", documented.__doc__ or "", re.DOTALL)[1])  # type: ignore[index]
    names: dict[str, Any] = {name: getattr(lightning_muon, name) for name in lightning_muon.__all__}
    names |= {"torch": torch, "nn": nn}
    exec(example, names)
    if documented is ParallelMuon:
        assert "1.weight" in capsys.readouterr().out
    if documented is FlexDeMo:
        assert names["optimizer"].num_exchanges == 1
