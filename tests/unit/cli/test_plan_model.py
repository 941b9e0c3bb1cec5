"""What is planned: YAML files, read without training or weights."""

import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_muon.cli.plan_model import read_config
from lightning_muon.config import MuonConfig

pytest.importorskip("lightning.pytorch")
pytest.importorskip("jsonargparse")

_MODULE = """
import lightning.pytorch as pl
import torch
from torch import nn


class Net(pl.LightningModule):
    devices = []

    def __init__(self, width: int = 8, needs_numbers: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.fused = nn.Linear(width, 3 * width).requires_grad_(not needs_numbers)
        if needs_numbers:
            assert torch.ones(1).item() == 1
        Net.devices.append(self.first.weight.device.type)

    def configure_model(self) -> None:
        self.head = nn.Linear(self.fused.out_features, 2)
"""
_YAML = """
model: {{class_path: planned_net.Net, init_args: {{width: 6, needs_numbers: {needs_numbers}}}}}
trainer:
  accelerator: cpu
  devices: auto
  strategy:
    class_path: lightning_muon.ParallelMuonStrategy
    init_args: {{{strategy}}}
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "planned_net.py").write_text(_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "planned_net", raising=False)

    def written(strategy: str = "", needs_numbers: bool = False) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(_YAML.format(strategy=strategy, needs_numbers=str(needs_numbers).lower()))
        return path

    return written


def test_the_model_is_built_on_the_meta_device_if_it_can(write: Any) -> None:
    planned = read_config(write())
    assert [(p.name, p.shape, p.kind) for p in planned.shapes.parameters] == [
        ("first.weight", (6, 4), "matrix"),
        ("first.bias", (6,), "elementwise"),
        ("fused.weight", (18, 6), "matrix"),
        ("fused.bias", (18,), "elementwise"),
        ("head.weight", (2, 18), "elementwise"),
        ("head.bias", (2,), "elementwise"),
    ]
    assert planned.optimizer == MuonConfig()
    planned = read_config(write(needs_numbers=True))
    assert [each.frozen for each in planned.shapes.parameters] == [False, False, True, True, False, False]
    assert sys.modules["planned_net"].Net.devices == ["meta", "cpu"]


def test_patterns_and_fused_come_from_the_strategy(write: Any) -> None:
    options = 'optimizer: {ns_steps: 3, adamw_patterns: ["first.*"], fused: {"fused.weight": 3}}'
    planned = read_config(write("replicate_size: 2, " + options))
    assert (planned.replicate, planned.shard) == (2, None)
    assert planned.optimizer.ns_steps == 3
    assert planned.shapes.parameters[0].kind == "elementwise"
    assert planned.shapes.parameters[2].splits == (6, 6, 6)
