"""``lightning-muon trace``, from a shape file to the trace, the picture and the two durations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_muon.cli.main import main
from lightning_muon.schedule.cost import CostModel

_MODULE = """
import lightning.pytorch as pl
from torch import nn

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.w = nn.ModuleList([nn.Linear(24, 40, bias=i == 0) for i in range(6)])
"""
_CONFIG = """
model: traced_net.Net
trainer:
  accelerator: cpu
  devices: 2
  strategy:
    class_path: lightning_muon.ParallelMuonStrategy
    init_args: {optimizer: {muon_patterns: ["*weight"], chunk_bytes: 4096}}
"""


def test_steps_of_a_config_are_recorded_drawn_and_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("matplotlib", "jsonargparse", "lightning.pytorch"):
        pytest.importorskip(package)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "traced_net.py").write_text(_MODULE)
    (tmp_path / "small.yaml").write_text(_CONFIG)
    out = tmp_path / "out"
    main(["trace", "--config", str(tmp_path / "small.yaml"), "--steps", "2", "--out", str(out)])
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    recorded = {event["name"].partition("[")[0] for event in events if event["ph"] == "X"}
    assert recorded == {"momentum", "gather", "newton_schulz", "scatter", "update", "adamw"}
    owned = [event["args"]["matrices"] for event in events if event["name"].startswith("newton_schulz")]
    assert sorted(name for names in owned for name in names) == [f"w.{i}.weight" for i in range(6)]
    assert {event["pid"] for event in events} == {0, 1}
    assert {event["tid"] for event in events if event["name"].startswith(("gather", "update"))} == {0, 1}
    assert (out / "timeline.png").stat().st_size > 10_000
    picture = (out / "timeline.svg").read_text()
    assert "measured" in picture and "predicted" in picture and "Net (small.yaml) on 1 x 2 ranks" in picture
    assert CostModel.from_dict(json.loads((out / "cost.json").read_text())).flops_per_second > 0
    report = capsys.readouterr().out
    assert "measured" in report and "predicted" in report and "of measured" in report


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shard-size", "0"], "--shard-size: must be at least 1, got 0"),
        ([], "t5-small does not say how many ranks there are; add --shard-size"),
        (["--shard-size", "2", "--shapes", "lama3-8b"], "did you mean 'llama3-8b'"),
        (["--shard", "2", "--replicate", "1", "--shapes", "deepseek-v3"], "GiB, and this machine has"),
    ],
)
def test_what_cannot_be_traced_is_refused_at_once(
    tmp_path: Path,
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["trace", "--shapes", "t5-small", "--out", str(tmp_path / "out"), *words])
    assert message in f"{ended.value} {capsys.readouterr().err}"
    assert not (tmp_path / "out").exists()
