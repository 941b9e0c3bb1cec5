"""lightning-muon plan, run through the command, and the configs that it reads."""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_muon.cli.main import main
from lightning_muon.cli.plan import WIDTH
from lightning_muon.cli.plan_model import read_config
from lightning_muon.config import MuonConfig
from tests.support.programs import ROOT


def _error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said, by the command or by the parser of its arguments."""
    with pytest.raises(SystemExit) as caught:
        main(["plan", *arguments])
    return f"{capsys.readouterr().err} {caught.value}"


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def text(*words: str) -> str:
        main(["plan", *words])
        return capsys.readouterr().out

    return text


def test_all_sections_are_there_and_every_line_fits_a_terminal(shown: Any) -> None:
    many = shown("--shapes", "t5-base", "--replicate-size", "2", "--shard-size", "128")
    few = shown("--shapes", "t5-small", "--shard-size", "4")
    for plan in (many, few, shown("--shapes", "t5-base", "--shard-size", "1")):
        for title in ("Parameters", "Owners ", "Bytes on the wire", "Predicted timeline"):
            assert title in plan
        assert max(map(len, plan.splitlines())) <= WIDTH and plan.isascii()
    # Names are whole, and nothing is frozen.
    names = few.partition("Owners")[0]
    assert "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight " in names and "frozen" not in names
    rows = [line.split() for line in few.partition("\nOwners")[2].splitlines()[3:7]]
    assert [row[:2] for row in rows] == [["rank", str(rank)] for rank in range(4)]
    assert sum(int(row[2]) for row in rows) == 96
    assert "busiest rank" in many and "idlest rank" in many


def test_the_page_shows_what_is_printed(shown: Any) -> None:
    page = (ROOT / "docs" / "planning.md").read_text()
    (words, table), *_ = re.findall(r"```sh\nlightning-muon plan (.*)\n```\n\n```text\n(.*?)```", page, re.DOTALL)
    text = shown(*words.split())
    head, found, legend, line = re.split(r"(?=^mode )|(?=^\* is)|(?=^recommended)", text, flags=re.MULTILINE)
    assert head + found + line == table and max(map(len, text.splitlines())) <= WIDTH
    assert legend.startswith("* is recommended")
    # The first row of the table of steps.
    assert "| 8 | 572 ms | 3.4 % |" in page and "Here 95.3 % of the transfers" in page
    step = shown("--shapes", "10b")
    assert re.search(r"within a replica +2,042\.2 +1,981\.9\n(.*\n)+.* +571\.94 +3\.4% +95\.3% ", step)
    # Of docs/gpus.md and docs/gradients.md.
    text = shown(*"--shapes llama3.2-1b --machine h100 --ranks 8 --rows 32 --length 2048".split())
    assert re.search(r" \* .* 0\.1301 .* 26\.6\n", text)
    text = shown(*"--shapes llama3-8b --machine h100 --ranks 16 --precision bf16-true".split())
    assert re.search(r"\nzero2 .* 18\.7 ", text)


def test_what_does_not_fit_or_divide_is_said(shown: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--shapes", "llama3-8b", "--machine", "h100", "--ranks", "16", "--rows", "64")
    # Too little memory: how much is missing, in the way that needs least.
    text = _error(capsys, *words, "--rank-memory", "5")
    assert re.search(r"nothing fits into 5 GiB per rank; \w+ with [\dx ]+ needs least, ([\d.]+) GiB, which is", text)
    # Too few rows, and ranks that make no grid.
    assert "divided so: ddp, zero2, fsdp, hsdp, flexdemo" in shown(*words[:4], "--ranks", "3", "--rows", "1")
    # The memory of this host is divided by the ranks of a node.
    share = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2 / 2**30
    text = shown("--shapes", "t5-small", "--machine", "cpu", "--ranks", "4", "--node-ranks", "2", "--length", "64")
    assert f", {round(share, 2):g} GiB per rank" in text


def test_flexdemo_is_recommended_only_by_a_config_that_has_one(
    shown: Any, capsys: pytest.CaptureFixture[str], config: Callable[..., tuple[str, str]], tmp_path: Path
) -> None:
    slow = {"flops_per_second": 1e12, "memory_bytes_per_second": 1e11, "bandwidth": [1e9, 1e6]}
    (tmp_path / "slow.json").write_text(json.dumps(slow))
    words = ("--cost", str(tmp_path / "slow.json"), "--ranks", "4", "--node-ranks", "2", "--length", "512")
    text = shown("--shapes", "t5-base", *words, "--rows", "512")
    assert re.search(r"\nflexdemo is [\d.]+ times as fast, and another optimizer .*: ParallelMuonStrategy\(", text)
    assert "flexdemo" not in text.partition("recommended: ")[2]
    init_args = "{base: muon, replicator: {class_path: lightning_muon.DCTTopK, init_args: {top_k: 4}}}"
    strategy = _strategy(f"optimizer: {{class_path: lightning_muon.FlexDeMoConfig, init_args: {init_args}}}")
    path = config(strategy, "devices: 2, num_nodes: 2", 4096)
    text = shown(*path, *words, "--rows", "4096")
    assert "recommended: flexdemo" in text and "pipeline is left out: Net cannot be cut into stages" in text
    assert "optimizer=FlexDeMoConfig(replicator=DCTTopK(chunk_size=64, top_k=4" in text
    # A step without --ranks is that of one node.
    assert "Net (config.yaml) on 1 x 2 = 2 ranks" in shown(*path)
    path = config(strategy.replace("base: muon", "base: adamw"), "devices: 2, num_nodes: 2")
    assert "FlexDeMo with base='adamw' has no Newton-Schulz to plan; add --ranks N" in _error(capsys, *path)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, str]]:
    """Writes a file of ``lightning-muon fit`` with a strategy, and returns the arguments that name it."""
    (tmp_path / "planned_module.py").write_text(_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "planned_module", raising=False)

    def written(
        strategy: str, trainer: str = "devices: 6", width: int = 8, needs_numbers: str = "false"
    ) -> tuple[str, str]:
        init_args = f"{{width: {width}, needs_numbers: {needs_numbers}}}"
        text = f"model: {{class_path: planned_module.Net, init_args: {init_args}}}\n"
        text += f"trainer: {{accelerator: cpu, {trainer}, strategy: {strategy}}}\n" if strategy else ""
        (tmp_path / "config.yaml").write_text(text)
        return "--config", str(tmp_path / "config.yaml")

    return written


_MODULE = """
import lightning.pytorch as pl
import torch
from torch import nn


class Net(pl.LightningModule):
    devices = []

    def __init__(self, width, needs_numbers):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.Linear(width, width))
        self.layers[1].requires_grad_(not needs_numbers)
        if needs_numbers:
            assert torch.ones(1).item() == 1
        Net.devices.append(self.layers[0].weight.device.type)

    def configure_model(self):
        self.head = nn.Linear(self.layers[1].out_features, 1)
"""


def _strategy(options: str) -> str:
    return f"{{class_path: lightning_muon.ParallelMuonStrategy, init_args: {{{options}}}}}"


def test_a_config_file_is_planned_for_its_own_mesh(
    shown: Any, capsys: pytest.CaptureFixture[str], config: Callable[..., tuple[str, str]]
) -> None:
    text = shown(*(path := config(_strategy("replicate_size: 2"))))
    assert "on 2 x 3 = 6 ranks" in text and "layers.*.weight" in text and "machine cpu: 0.56 TFLOP/s" in text
    assert "2 bytes per element on the wire" in text
    assert "on 1 x 4 = 4 ranks" in shown(*path, "--replicate-size", "1", "--shard-size", "4")
    assert "machine h100" in shown(*path, "--machine", "h100")
    for overlap, hidden in (("step", r"[1-9]\d*\.\d%"), ("off", r"0\.0%")):
        options = f'optimizer: {{compute_dtype: float32, look_ahead: 5, bucket_bytes: 1, overlap: "{overlap}"}}'
        text = shown(*config(_strategy(options), "devices: 2", 1024))
        assert "4 bytes per element on the wire" in text and "look-ahead 5" in text
        assert re.search(rf"gather +within a replica +2\.0 (.*\n)+.*% +{hidden} ", text)
    assert "does not say how many ranks there are; add --shard-size" in _error(capsys, *config(""))
    # The precision of the Trainer, unless the command line says another one.
    path = config(_strategy("replicate_size: 2"), "devices: 6, precision: 16-mixed")
    assert "precision '16-mixed' of the config is none of 32-true, bf16-mixed" in _error(capsys, *path, "--ranks", "2")
    words = ("--ranks", "2", "--rows", "2", "--length", "8", "--precision", "bf16-true")
    assert "2 rows of 8 tokens, bf16-true" in shown(*path, *words)


def test_the_model_is_built_on_the_meta_device_if_it_can(config: Callable[..., tuple[str, str]]) -> None:
    options = 'optimizer: {ns_steps: 3, adamw_patterns: ["*.0.*"], fused: {"layers.1.weight": 3}}'
    planned = read_config(Path(config(_strategy("replicate_size: 2, " + options), "devices: auto", width=6)[1]))
    assert [(p.name, p.shape, p.kind, p.splits) for p in planned.shapes.parameters] == [
        ("layers.0.weight", (6, 8), "elementwise", ()),
        ("layers.0.bias", (6,), "elementwise", ()),
        ("layers.1.weight", (6, 6), "matrix", (2, 2, 2)),
        ("layers.1.bias", (6,), "elementwise", ()),
        ("head.weight", (1, 6), "elementwise", ()),
        ("head.bias", (1,), "elementwise", ()),
    ]
    assert (planned.replicate, planned.shard, planned.optimizer.ns_steps) == (2, None, 3)
    planned = read_config(Path(config("parallel_muon", needs_numbers="true")[1]))
    assert planned.optimizer == MuonConfig()
    assert [each.frozen for each in planned.shapes.parameters] == [False, False, True, True, False, False]
    assert sys.modules["planned_module"].Net.devices == ["meta", "cpu"]
