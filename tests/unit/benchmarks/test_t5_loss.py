"""The comparison of losses of the T5 recipe: which runs it makes, and what its table says of them."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import t5_loss


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is trained, each with a loss that depends on its rates."""
    runs = list[dict[str, Any]]()

    def lightning(command: list[str], **_: Any) -> None:
        overrides = Path(command[command.index("--config", command.index("--config") + 1) + 1])
        run = yaml.safe_load(overrides.read_text())
        runs.append(run)
        model, strategy = run["model"]["init_args"], run["trainer"]["strategy"]
        embedding_rate = model["lr"] * model["embedding_lr_scale"]
        loss = 5 + abs(model["lr"] - 2e-3) + abs(embedding_rate - 0.04) + run["seed_everything"] % 10 / 10
        if strategy != "auto":
            loss += abs(strategy["init_args"]["optimizer"]["muon_lr_factor"] - 4) - 1
        text = f"step,val_loss,rougeL\n0,8,\n159,6,0.1\n,,\n319,{loss},0.2\n"
        (overrides.parent / "metrics.csv").write_text(text)

    monkeypatch.setattr(t5_loss.subprocess, "run", lightning)
    return runs


def test_rates_are_tuned_and_shared_and_runs_are_made_once(
    made: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "losses.svg"
    words = ["t5_loss.py", "--only", "muon", 'mine={"momentum": 0.9}', "--seeds", "0", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*words, "--picture", str(picture)])
    t5_loss.main()
    said = capsys.readouterr().out
    assert len(made) == 4 * 3 + 5 + 3 * 2
    assert said.endswith(
        "rates of AdamW: 0.002, embedding 0.04; factor of Muon: 4\n\n"
        "| configuration | validation loss | ROUGE-L |\n"
        "| --- | ---: | ---: |\n"
        "| adamw | 5.1000 +- 0.1414 | 0.200 +- 0.000 |\n"
        "| muon | 4.1000 +- 0.1414 | 0.200 +- 0.000 |\n"
        "| mine | 4.1000 +- 0.1414 | 0.200 +- 0.000 |\n"
    )
    last = made[-1]["trainer"]["strategy"]["init_args"]["optimizer"]
    assert last == {"muon_lr_factor": 4, "momentum": 0.9}
    assert all(f">{name}</text>" in picture.read_text() for name in ("adamw", "muon", "mine"))
    t5_loss.main()
    assert len(made) == 23 and capsys.readouterr().out == said
