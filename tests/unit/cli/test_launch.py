"""One file for Accelerate and for us, and scripts that know of neither of its halves."""

import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from lightning_muon import MuonConfig
from lightning_muon.cli import launch
from lightning_muon.cli.launch import RUNNER, run_by_us, split_config
from lightning_muon.engine.options import Options
from tests.support.programs import ROOT, program_environment
from tests.support.warm_python import warm_python

_VARIABLE = "LIGHTNING_MUON_CONFIG"
_BOTH = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
use_cpu: true
num_machines: 1
num_processes: 2
main_process_port: 0
lightning_muon:
  shard_size: 2
  optimizer: {momentum: 0.8}
"""


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(_VARIABLE, raising=False)
    path = tmp_path / "both.yaml"
    path.write_text(_BOTH)
    return path


def test_a_file_is_split_for_as_long_as_it_is_needed(both: Path) -> None:
    with split_config(str(both)) as rest:
        assert rest is not None
        side = os.environ[_VARIABLE]
        assert Options.from_file(side) == Options(shard_size=2, optimizer=MuonConfig(momentum=0.8))
        content = yaml.safe_load(_BOTH)
        del content["lightning_muon"]
        assert yaml.safe_load(Path(rest).read_text()) == content
    assert _VARIABLE not in os.environ
    assert not Path(rest).exists()


def test_the_example_has_every_option_with_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_VARIABLE, raising=False)
    path = ROOT / "examples" / "accelerate.yaml"
    with split_config(str(path)) as rest:
        stock = load_config_from_file(rest)
        assert (stock.distributed_type.value, stock.num_processes) == ("FSDP", 8)
        assert Options.from_file(os.environ[_VARIABLE]) == Options()
    live = re.sub(r"^  # (?=\w+: )", "  ", path.read_text().partition("lightning_muon:\n")[2], flags=re.MULTILINE)
    written = yaml.safe_load(live)
    assert written.keys() == vars(Options()).keys()
    assert Options.from_mapping(written) == Options()


def test_our_runner_starts_the_script() -> None:
    for is_module, words in ((False, ["a.py", "--x", "1"]), (True, ["-m", "a.py", "--x", "1"])):
        script = Namespace(no_python=False, module=is_module, training_script="a.py", training_script_args=["--x", "1"])
        run_by_us(script)
        assert (script.module, script.training_script, script.training_script_args) == (True, RUNNER, words)


_SCRIPT = """
import torch
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator()
model = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 5), nn.Linear(5, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.backward(model(torch.arange(7)).square().mean())
optimizer.step()
assert type(accelerator).__module__ == "lightning_muon.integrations.accelerate.accelerator"
assert type(optimizer.optimizer).__name__ == "ParallelMuon" and optimizer.param_groups[0]["momentum"] == 0.8
assert tuple(accelerator.device_mesh.shape) == (1, 2)
assert len(model[1].weight.to_local()) == (3, 2)[accelerator.process_index]
open(f"{accelerator.process_index}.done", "w").close()
"""


@pytest.mark.long
def test_an_unchanged_script_is_trained_by_us(both: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT)
    kept = {key: value for key, value in program_environment().items() if not key.startswith(("ACCELERATE_", "FSDP_"))}
    command = [warm_python(), "-m", "lightning_muon", "launch", "--config_file", str(both), "script.py"]
    options: Any = {"cwd": tmp_path, "env": kept, "capture_output": True, "text": True}
    done = subprocess.run(command, **options, timeout=150.0, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.glob("*.done")) == ["0.done", "1.done"]


_SHORT_SCRIPT = """
import sys
from pathlib import Path
import neighbour
Path(sys.argv[1]).write_text(f"{__name__} {neighbour.VALUE} {sys.argv[2:]}")
"""


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Counts that the Accelerator is replaced, which would outlast the test; undoes what else is changed."""
    seen: list[str] = []
    monkeypatch.setattr(launch, "replace_accelerator", lambda: seen.append("accelerate"))
    monkeypatch.setattr(sys, "argv", ["python"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "neighbour", raising=False)
    return seen


@pytest.mark.parametrize("is_module", [False, True])
def test_a_script_finds_its_neighbours_and_its_arguments(tmp_path: Path, replaced: list[str], is_module: bool) -> None:
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "train.py").write_text(_SHORT_SCRIPT)
    (folder / "neighbour.py").write_text("VALUE = 5\n")
    if is_module:
        sys.path.insert(0, str(folder))
    words = ["-m", "train"] if is_module else [str(folder / "train.py")]
    launch.run_script([*words, str(tmp_path / "out"), "--lr", "1"])
    assert (tmp_path / "out").read_text() == "__main__ 5 ['--lr', '1']"
    assert replaced == ["accelerate"]
