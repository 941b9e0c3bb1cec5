"""The command, run as a user would."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import lightning_muon
from lightning_muon.cli import main as command
from tests.support.programs import program_environment, run_program
from tests.support.warm_python import warm_python

_MODULE = """
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn


class Net(BoringModel):
    configure_optimizers = pl.LightningModule.configure_optimizers

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Sequential(nn.Linear(32, width), nn.Linear(width, width), nn.Linear(width, 2))

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(self(batch)), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("loss", self.loss(self(batch)), sync_dist=True)
"""
_CONFIG = """
seed_everything: 1
model: {class_path: own.net.Net, init_args: {width: 6}}
data: lightning.pytorch.demos.boring_classes.BoringDataModule
trainer: {accelerator: cpu, devices: 2, max_epochs: 1, enable_progress_bar: false}
"""
_STRATEGY = """
trainer:
  strategy:
    class_path: lightning_muon.ParallelMuonStrategy
    init_args:
      replicate_size: 2
      save_distributed_checkpoint: false
      wrap_policy: [Linear]
      optimizer: {lr: 0.02, adamw_patterns: ["layer.0.*"]}
"""
_OPTIMIZER = """
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.01}}
lr_scheduler: {class_path: torch.optim.lr_scheduler.StepLR, init_args: {step_size: 1}}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "own").mkdir()
    for name, text in {
        "own/__init__.py": "", "own/net.py": _MODULE, "config.yaml": _CONFIG,
        "strategy.yaml": _STRATEGY, "optimizer.yaml": _OPTIMIZER,
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    return tmp_path


def _run(project: Path, *arguments: str) -> str:
    pytest.importorskip("jsonargparse")
    pytest.importorskip("lightning.pytorch")
    return run_program("-m", "lightning_muon", *arguments, directory=project, num_ranks=2)


def test_print_config_shows_the_strategy(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jsonargparse")
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as exiting:
        command.main(["fit", "--config", "config.yaml", "--print_config"])
    assert not exiting.value.code and "strategy: parallel_muon" in capsys.readouterr().out


def test_fit_and_test_take_strategy_and_optimizer_from_yaml(project: Path) -> None:
    files = ("config.yaml", "strategy.yaml", "optimizer.yaml")
    text = _run(project, "fit", *(word for file in files for word in ("--config", file)))
    assert "adamw_patterns" in text and "AdamW -> ParallelMuon for matrices" in text
    version = project / "lightning_logs" / "version_0"
    assert (version / "config.yaml").is_file()
    (checkpoint,) = (version / "checkpoints").iterdir()
    assert checkpoint.is_file()
    assert "Test metric" in _run(project, "test", "--config", "config.yaml", "--ckpt_path", str(checkpoint))


_BLOCKED = """
import contextlib, io, sys

ended = []
for words, blocked in CASES:
    for name in list(sys.modules):  # A warm interpreter, and the case before, have imported them.
        if name.partition(".")[0] in ("lightning_muon", *blocked):
            del sys.modules[name]
    sys.modules.update(dict.fromkeys(blocked))
    sys.argv, code, printed = ["lightning-muon", *words], 0, io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            from lightning_muon.cli.main import main
            main()
        except SystemExit as exiting:
            code = exiting.code
            if isinstance(code, str):
                print(code)
    ended.append((code, printed.getvalue()))
print(repr(ended))
"""


def _commands(folder: Path, cases: Sequence[Any], python: str) -> list[tuple[Any, str]]:
    """Code and output of each case, words of the command and packages that are not installed, in one process."""
    (folder / "blocked.py").write_text(f"CASES = {cases!r}\n{_BLOCKED}")
    done = subprocess.run(
        [python, "blocked.py"],
        cwd=folder, env=program_environment(), capture_output=True, text=True, timeout=100.0, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)


def test_help_and_version_are_quick_and_need_no_torch(tmp_path: Path) -> None:
    absent = ("torch", "lightning", "pytorch_lightning", "accelerate")
    (code, text), version = _commands(tmp_path, [(["--help"], absent), (["--version"], absent)], sys.executable)
    names = ("fit", "validate", "test", "predict", "plan", "convert", "doctor", "verify", "launch")
    assert not code and [line.split()[0] for line in text.partition("COMMAND\n")[2].splitlines()] == list(names)
    assert version == (0, f"{lightning_muon.__version__}\n")


_FRAMEWORKS = ("lightning", "pytorch_lightning", "accelerate", "jsonargparse", "yaml")
_CASES = [
    (("fit", "--config", "config.yaml"), ("lightning", "pytorch_lightning"), "lightning"),
    (("fit", "--config", "config.yaml"), ("jsonargparse",), "lightning"),
    (("plan", "--config", "config.yaml"), ("lightning", "pytorch_lightning"), "lightning"),
    (("convert", "a", "b"), _FRAMEWORKS, "lightning"),
    (("plan", "--shapes", "t5-small", "--draw", "a.png"), ("matplotlib",), "plots"),
    (("launch", "script.py"), ("accelerate",), "accelerate"),
]


def test_a_missing_extra_is_one_line_and_plan_needs_none(project: Path) -> None:
    plan = (("plan", "--shapes", "t5-small"), _FRAMEWORKS)
    *refused, (code, text) = _commands(project, [*(case[:2] for case in _CASES), plan], warm_python())
    assert not code and "Owners in each replica" in text
    for (words, _, extra), (code, text) in zip(_CASES, refused, strict=True):
        assert code == 2 and len(text.splitlines()) == 1, words
        assert f'pip install "lightning-muon[{extra}]"' in text


def test_only_our_words_stand_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for raised, expected in ((ValueError("of a mesh"), ValueError), (TypeError("not iterable"), TypeError)):
        monkeypatch.setattr("lightning_muon.cli.verify._checkpoints", mock.Mock(side_effect=raised))
        monkeypatch.setattr("lightning_muon.cli.launch.run_by_us", mock.Mock(side_effect=raised))
        for words in (["verify", "path"], ["launch", "--cpu", "--num_processes", "2", __file__]):
            with pytest.raises(expected):
                command.main(words)
