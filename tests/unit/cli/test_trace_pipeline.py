"""``lightning-muon trace`` of a pipeline, run through the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_muon.cli import trace_pipeline
from lightning_muon.cli.main import main
from lightning_muon.schedule.program import Op
from lightning_muon.schedule.simulate import Span, Timeline
from tests.support.programs import run_program

_MODULE = """
import lightning as L, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(12, 12) for _ in range(6)))

    def pipeline_loss(self, output, target):
        return (output - target).square().sum(), target.numel()

    def training_step(self, batch, _): ...

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(16, 12), torch.randn(16, 12)), batch_size=8)
"""
_CONFIG = """
model: {class_path: net.Net}
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 1
  gradient_clip_val: 0.5
  callbacks: [{class_path: lightning.pytorch.callbacks.ModelCheckpoint}]
  strategy: {class_path: lightning_muon.ParallelMuonStrategy, init_args: {pipeline_size: 2}}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(_MODULE)
    (tmp_path / "config.yaml").write_text(_CONFIG)
    return tmp_path


def test_steps_of_a_pipeline_are_drawn_above_their_plan(project: Path) -> None:
    for package in ("jsonargparse", "lightning.pytorch", "matplotlib"):
        pytest.importorskip(package)
    words = ("--pipeline-schedule", "zb_h1", "--pipeline-microbatches", "4", "--steps", "3", "--out", "out")
    report = run_program(
        *("-m", "lightning_muon", "trace", "--config", "config.yaml", *words), directory=project, num_ranks=2
    )
    assert "Net: zb_h1 on 2 ranks, 4 micro-batches" in report
    assert "ranks idle" in report and "rank 1: last backward ends at" in report
    trace = json.loads((project / "out" / "trace.json").read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}, "each rank as it was measured, and as it was planned"
    for rank in (0, 1):
        measured, planned = ([each["name"] for each in events if each["pid"] == rank + of] for of in (0, 2))
        assert measured == planned
        kinds = {name.partition("[")[0] for name in measured}
        assert kinds >= {"F", "I", "W", "activation", "gradient", "reduce_grad", "gradient_norm", "newton_schulz"}
        assert len([name for name in measured if name.startswith("F[")]) == 4
    assert all(0 < trace["otherData"][f"idle share, {what}"] < 1 for what in ("measured", "planned"))
    assert {path.name for path in (project / "out").iterdir()} == {"trace.json", "timeline.png", "timeline.svg"}
    assert "idle" in (project / "out" / "timeline.svg").read_text()
    # No checkpoint, and no log.
    assert {path.name for path in project.iterdir()} - {"__pycache__"} == {"net.py", "config.yaml", "out"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shapes", "t5-small", "--pipeline-size", "2"], "give --config, not --shapes"),
        (["--shapes", "t5-small", "--pipeline-schedule", "1f1b"], "means nothing without a pipeline"),
        (["--shapes", "t5-small", "--pipeline-microbatches", "4"], "--pipeline-microbatches means nothing"),
    ],
)
def test_options_of_a_pipeline_need_one(tmp_path: Path, words: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        main(["trace", *words, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_rank_whose_optimizer_had_nothing_to_do() -> None:
    backward = Span(Op(kind="B", key="0 0", rank=0, items=(0, 0)), 0.0, 0.002)
    told = trace_pipeline._line_of(0, Timeline({0: [backward]}))
    assert told.startswith("rank 0: last backward ends at 2.0 ms, its optimizer has nothing to do")
