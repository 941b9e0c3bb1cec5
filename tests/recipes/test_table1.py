"""Table 1: the grid goes on where it stopped, and a row is trained by two processes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from recipes.t5_summarization import table1
from tests.recipes.rows import write_csv
from tests.support.programs import ROOT, run_program


def test_an_interrupted_grid_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = table1.Grid("demo", table1.settings_of("demo", []), tmp_path / "demo")
    trained: list[tuple[str, int]] = []

    def start(words: Sequence[str], log: Path) -> int:
        name, seed = words[1], int(words[2])
        trained.append((name, seed))
        if len(trained) == 2:
            raise KeyboardInterrupt
        if (name, seed) == ("k8", 1):
            return 7
        loss = {"adamw": 4.0, "k8": 6.0}[name] + 0.5 * seed
        result: dict[str, Any] = {"key": grid.key(name, seed), "megabytes": 2.0, "train_loss": 3.0, "val_loss": loss}
        with (grid.folder / table1.RESULTS).open("a") as file:
            file.write(json.dumps(result) + "\n")
        return 0

    monkeypatch.setattr(table1, "start", start)
    words = ["--rows", "adamw", "k8", "--out", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        table1.main(words)
    assert table1.main(words) == 1
    assert trained == [("adamw", 0), ("k8", 0), ("k8", 0), ("adamw", 1), ("k8", 1)]
    printed = capsys.readouterr().out
    assert "[3/3] k8 seed 1: failed with status 7" in printed
    assert "| AdamW (HSDP) | 2.000 | 3.000 | 4.250 +- 0.250 | +0.0% | 1 | 2 |" in printed
    assert "| k = 8 of 64 x 64 | 2.000 | 3.000 | 6.000 | +41.2% | 2 | 1 |" in printed
    assert table1.main([*words, "--report-only", "--set", "model.lr=1"]) == 0, "other settings are other runs"
    assert "AdamW (HSDP)" not in capsys.readouterr().out


def test_one_row_is_trained_by_two_processes_and_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {"vocab_size": 300, "d_model": 32, "d_ff": 32, "num_layers": 1, "num_decoder_layers": 1}
    changes = {
        "trainer.devices": 2,
        "trainer.limit_train_batches": 2,
        "strategy.replicate_size": 2,
        "strategy.shard_size": 1,
        "data.source": str(write_csv(tmp_path)),
        "data.vocab_size": 300,
        "data.batch_size": 2,
        "data.validation_share": 0.25,
        "data.cache_dir": str(tmp_path / "cache"),
    } | {f"model.architecture.{name}": value for name, value in model.items()}
    words = ["--out", str(tmp_path), "--set", *(f"{key}={json.dumps(value)}" for key, value in changes.items())]
    module = "recipes.t5_summarization.table1"
    run_program("-m", module, "--train", "diloco_muon", "5", *words, directory=ROOT, num_ranks=2)
    [line] = (tmp_path / "demo" / table1.RESULTS).read_text().splitlines()
    stored = json.loads(line)
    assert (stored["row"], stored["seed"], stored["steps"], stored["nodes"]) == ("diloco_muon", 5, 8, 2)
    assert 0 < stored["val_loss"] < 6 and 0 < stored["train_loss"] < 6
    assert stored["megabytes"] > 0
    assert table1.main(["--report-only", "--seeds", "5", *words]) == 0
    assert "| DiLoCo, period 10, Muon inside |" in capsys.readouterr().out
