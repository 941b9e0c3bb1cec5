"""What is planned: YAML files read without training or weights, fused weights, and words for FlexDeMo."""

import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_muon.cli.plan_model import config_from_words, read_config, with_fused, with_stacks_cut_along
from lightning_muon.config import MuonConfig
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.replicators import DCTTopK, DiLoCo, Random
from lightning_muon.schedule.shapes import ModelShapes, ParameterShape

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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [unclosed\n  a: b\n", "is no YAML file"),
        ("model: nothing.Here\n", "No module named 'nothing'"),
        ("trainer: {}\n", "model"),
        ("modle: {}\n", "did you mean 'model'"),
        ("trainer: {devicez: 2}\n", "did you mean 'devices'"),
    ],
)
def test_a_file_that_is_refused_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_config(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], FlexDeMoConfig(replicator=DCTTopK(16, 8), base="adamw")),
        (["top_k=4"], FlexDeMoConfig(replicator=DCTTopK(16, 4), base="adamw")),
        (["replicator=DCTTopK", "base=muon"], FlexDeMoConfig(replicator=DCTTopK(16, 8), base="muon")),
        (
            ["value_format=fp32", "bucket_bytes=1000"],
            FlexDeMoConfig(replicator=DCTTopK(16, 8), base="adamw", value_format="fp32", bucket_bytes=1000),
        ),
        (["rate=0.25", "replicator=Random"], FlexDeMoConfig(replicator=Random(0.25), base="adamw")),
        (["replicator=DiLoCo", "period=9"], FlexDeMoConfig(replicator=DiLoCo(period=9), base="adamw")),
    ],
)
def test_words_replace_what_they_name(words: list[str], expected: FlexDeMoConfig) -> None:
    assert config_from_words(words, FlexDeMoConfig(replicator=DCTTopK(16, 8), base="adamw")) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["top=3"], r"no option 'top'; did you mean 'top_k'\?"),
        (["replicator=DCTTop"], r"no option 'DCTTop'; did you mean 'DCTTopK'\?"),
        (["top_k"], r"KEY=VALUE, such as top_k=8, got 'top_k'"),
        (["lr=1"], r"no option 'lr'; the options are replicator, base, .* top_k"),
    ],
)
def test_a_wrong_word_is_explained(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_words(words, FlexDeMoConfig())


def _model(*shapes: tuple[int, ...]) -> ModelShapes:
    kinds = {2: "matrix", 3: "stack"}
    parameters = [ParameterShape(name=f"w{i}", shape=shape, kind=kinds[len(shape)]) for i, shape in enumerate(shapes)]
    return ModelShapes(name="model", source="", parameters=tuple(parameters))


def test_fused_weights_are_divided_and_stacks_cut() -> None:
    fused = with_fused(_model((12, 4), (8, 4), (4, 4)), {"*0": (6, 3, 3), "*1": (2,)})
    assert [parameter.splits for parameter in fused.parameters] == [(6, 3, 3), (4, 4), ()]
    model = with_stacks_cut_along(_model((8, 4), (2, 8, 4)), 1)
    assert [parameter.shard_dim for parameter in model.parameters] == [0, 1]


@pytest.mark.parametrize(
    ("fused", "message"),
    [
        ({"b": (2,)}, "'b' matches no matrix of model"),
        ({"w0": (3,)}, "do not sum to dimension 0"),
        ({}, "model has no stacks"),
    ],
)
def test_patterns_that_fit_nothing_are_refused(fused: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_stacks_cut_along(with_fused(_model((10, 4)), fused), 1)
