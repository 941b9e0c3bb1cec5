"""The command, run as a user would."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from lightning_muon.cli import main as command
from tests.support.programs import run_program

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
    return run_program("-m", "lightning_muon.cli.main", *arguments, directory=project, num_ranks=2)


def test_print_config_shows_the_strategy(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jsonargparse")
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "argv", ["lightning-muon", "fit", "--config", "config.yaml", "--print_config"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 0 and "strategy: parallel_muon" in capsys.readouterr().out


def test_fit_and_test_take_strategy_and_optimizer_from_yaml(project: Path) -> None:
    files = ("config.yaml", "strategy.yaml", "optimizer.yaml")
    text = _run(project, "fit", *(word for file in files for word in ("--config", file)))
    assert "adamw_patterns" in text and "AdamW -> ParallelMuon for matrices" in text
    assert "before `optimizer.step()`" not in text
    version = project / "lightning_logs" / "version_0"
    assert (version / "config.yaml").is_file()
    (checkpoint,) = (version / "checkpoints").iterdir()
    assert checkpoint.is_file()
    assert "Test metric" in _run(project, "test", "--config", "config.yaml", "--ckpt_path", str(checkpoint))


def test_a_missing_lightning_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"pip install 'lightning-muon\[lightning\]'"):
        command.make_cli(["fit"])


@pytest.mark.parametrize("words", [["--config", "{}"], ["--config=config.yaml", "--config={}"]])
def test_a_wrong_key_of_the_strategy_names_the_nearest(
    project: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr(command, "make_cli", lambda *args, **kwargs: None)
    command.main(["fit", *(word.format("strategy.yaml") for word in words)])
    for right, wrong in (("wrap_policy", "wrap_polici"), ("adamw_patterns", "adamw_pattern")):
        Path("wrong.yaml").write_text(_STRATEGY.replace(right, wrong))
        with pytest.raises(SystemExit, match=rf"wrong\.yaml: trainer\.strategy: .*'{wrong}'; did you mean '{right}'"):
            command.main(["fit", *(word.format("wrong.yaml") for word in words)])


def test_what_is_no_config_of_ours_is_for_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(command, "make_cli", lambda *args, **kwargs: calls.append(args))
    texts = ("trainer: [", "trainer: 3", "trainer: {strategy: ddp}", "model: 1", _STRATEGY.replace("0.02", "fast"))
    for text in texts:
        (tmp_path / "any.yaml").write_text(text)
        command.main(["fit", "--config", str(tmp_path / "any.yaml")])
    command.main(["fit", "--config", str(tmp_path / "missing.yaml")])
    command.main(["fit", "--config"])
    assert len(calls) == len(texts) + 2
