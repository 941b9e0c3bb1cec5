"""``lightning-muon trace``, from a shape file to the trace, the picture and the two durations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_muon.cli.main import main
from lightning_muon.schedule.cost import CostModel


def _shape_file(folder: Path) -> Path:
    path = folder / "small.json"
    layers = {"repeat": 6, "parameters": [{"name": "w{i}", "shape": [40, 24], "kind": "matrix"}]}
    bias = {"name": "bias", "shape": [40], "kind": "elementwise"}
    path.write_text(json.dumps({"name": "small", "parameters": [layers, bias]}))
    return path


def test_steps_are_recorded_drawn_and_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.delenv("RANK", raising=False)
    out = tmp_path / "out"
    shapes = str(_shape_file(tmp_path))
    main(["trace", "--shapes", shapes, "--ranks", "2", "--steps", "2", "--chunk-bytes", "4096", "--out", str(out)])
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    recorded = {event["name"].partition("[")[0] for event in events if event["ph"] == "X"}
    assert recorded == {"momentum", "gather", "newton_schulz", "scatter", "update", "adamw"}
    owned = [event["args"]["matrices"] for event in events if event["name"].startswith("newton_schulz")]
    assert sorted(name for names in owned for name in names) == [f"w{i}" for i in range(6)]
    assert {event["pid"] for event in events} == {0, 1}
    assert (out / "timeline.png").stat().st_size > 10_000
    picture = (out / "timeline.svg").read_text()
    assert "measured" in picture and "predicted" in picture and "small on 1 x 2 ranks" in picture
    assert CostModel.from_dict(json.loads((out / "cost.json").read_text())).flops_per_second > 0
    report = capsys.readouterr().out
    assert "measured" in report and "predicted" in report and "of measured" in report


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["--ranks", "4", "--replicate", "3"], "--replicate 3 must divide --ranks 4"),
        (["--ranks", "2", "--look-ahead", "0"], "look_ahead must be an integer of at least 1, got 0"),
        (["--ranks", "2", "--shapes", "lama3-8b"], "did you mean 'llama3-8b'"),
        (["--ranks", "2", "--shapes", "deepseek-v3"], "GiB, and this machine has"),
    ],
)
def test_what_cannot_be_traced_is_refused_at_once(
    tmp_path: Path, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match=message):
        main(["trace", "--shapes", "t5-small", "--out", str(tmp_path / "out"), *words])
    assert not (tmp_path / "out").exists()
