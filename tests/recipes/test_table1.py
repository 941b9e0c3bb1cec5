"""Table 1: its rows are configs, the grid goes on where it stopped, and a row is trained by two processes."""

import json
from pathlib import Path

import pytest
import yaml

from recipes.t5_summarization.table1 import ROOT, missing_runs, run_grid
from recipes.t5_summarization.table1_config import CONFIG, Run
from recipes.t5_summarization.table1_fit import hsdp_sent_bytes, optimizer_choice
from recipes.t5_summarization.table1_results import RESULTS, append_result
from tests.recipes.rows import write_csv
from tests.recipes.table1_runs import grid_of, result_of
from tests.support.programs import run_program

FILE = yaml.safe_load(CONFIG.read_text())


def test_an_interrupted_grid_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reports: list[int] = []
    arguments = ("--rows", "adamw", "k4", "k8", "--max-steps", "40")
    grid, trained = grid_of(*arguments, folder=tmp_path), []

    def train(run: Run, log: Path) -> int:
        trained.append((run.row, run.seed))
        if len(trained) == 3:
            raise KeyboardInterrupt
        append_result(tmp_path / RESULTS, result_of(run, 5.0))
        return 0

    def report() -> None:
        reports.append(len(missing_runs(grid)))

    with pytest.raises(KeyboardInterrupt):
        run_grid(grid, train, report)
    assert [(run.row, run.seed) for run in missing_runs(grid)] == [("k8", 0), ("adamw", 1), ("k4", 1), ("k8", 1)]
    assert run_grid(grid, train, report) == []
    assert trained == [("adamw", 0), ("k4", 0), ("k8", 0), ("k8", 0), ("adamw", 1), ("k4", 1), ("k8", 1)]
    assert reports == [5, 4, 3, 2, 1, 0], "the report is written after each run"
    assert "4 of 6 runs to do" in capsys.readouterr().out
    assert len(missing_runs(grid_of("--rows", "adamw", "--max-steps", "80", folder=tmp_path))) == 2


def test_each_row_is_a_config_that_exists() -> None:
    settings = {row: each["row"] for row, each in grid_of().settings.items()}
    assert optimizer_choice(settings["adamw"]) == "keep"
    assert optimizer_choice(settings["muon"]).dedupe == "never"
    for each in (each for each in settings.values() if each["optimizer"] == "flexdemo"):
        config = optimizer_choice(each)
        assert type(config.replicator).__name__ == each["replicator"]["name"]
        assert {key: getattr(config, key) for key in each["options"]} == each["options"]


def test_one_row_is_trained_by_two_processes_and_stored(tmp_path: Path) -> None:
    config = tmp_path / "table1.yaml"
    content = json.loads(json.dumps(FILE))
    content["sizes"]["demo"]["output_dir"] = str(tmp_path / "out")
    config.write_text(yaml.safe_dump(content))
    model = {"vocab_size": 300, "d_model": 32, "d_ff": 32, "num_layers": 1, "num_decoder_layers": 1}
    changes = {
        "trainer.devices": 2,
        "strategy.replicate_size": 2,
        "strategy.shard_size": 1,
        "data.source": str(write_csv(tmp_path)),
        "data.vocab_size": 300,
        "data.batch_size": 2,
        "data.validation_share": 0.25,
        "data.cache_dir": str(tmp_path / "cache"),
    } | {f"model.architecture.{name}": value for name, value in model.items()}
    run_program(
        *("-m", "recipes.t5_summarization.table1_run", "--row", "diloco_muon", "--seed", "5"),
        *("--config", str(config), "--max-steps", "8"),
        *("--set", *(f"{key}={json.dumps(value)}" for key, value in changes.items())),
        directory=ROOT,
        num_ranks=2,
    )
    [line] = (tmp_path / "out" / RESULTS).read_text().splitlines()
    stored = json.loads(line)
    assert (stored["row"], stored["seed"], stored["steps"], stored["world"]) == ("diloco_muon", 5, 8, [2, 1])
    assert len(stored["val_losses"]) == 4 and stored["val_losses"][-1] == stored["val_loss"]
    assert 0 < stored["val_loss"] < 6
    assert 0 < stored["sent_bytes"] < hsdp_sent_bytes(stored["num_parameters"], num_nodes=2)
    assert stored["samples_per_second"] > 0
