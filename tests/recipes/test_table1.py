"""Table 1: its grid, the measurement of a run, that it goes on where it stopped, and table and plot of the results."""

import csv
import dataclasses
import inspect
import io
import json
import math
import random
from pathlib import Path

import pytest
import yaml

from recipes.t5_summarization import table1, table1_fit
from recipes.t5_summarization.data import SummarizationData
from recipes.t5_summarization.model import T5Summarizer
from recipes.t5_summarization.table1 import ROOT, missing_runs, parse, run_grid, train_in_processes, train_missing
from recipes.t5_summarization.table1_config import CONFIG, Run, load_grid, shortened
from recipes.t5_summarization.table1_fit import StepClock, hsdp_sent_bytes, learning_rates, optimizer_choice
from recipes.t5_summarization.table1_report import csv_text, markdown_table, summaries, write_report
from recipes.t5_summarization.table1_results import RESULTS, append_result, read_results, summarize
from tests.recipes.rows import write_csv
from tests.recipes.table1_runs import grid_of, result_of
from tests.support.programs import run_program

FILE = yaml.safe_load(CONFIG.read_text())


def test_the_grid_has_the_rows_of_the_paper_and_two_seeds() -> None:
    grid = grid_of()
    assert grid.seeds == [0, 1]
    assert grid.settings["adamw"]["row"]["optimizer"] == "adamw"
    for top_k in (1, 2, 4, 8, 16, 32):
        row = grid.settings[f"k{top_k}"]["row"]
        assert row["replicator"] == {"name": "DCTTopK", "chunk_size": 64, "top_k": top_k}
        assert row["options"]["decay"] == 0.999
        assert f"k = {top_k} of 64 x 64" in grid.labels[f"k{top_k}"]
        assert grid.settings[f"strip{top_k}"]["row"]["replicator"] == {**row["replicator"], "strips": True}
    wanted = {"adamw", "diloco", "diloco_muon", "diloco30", "diloco30_muon"}
    assert wanted | {"k32_fp32", "k32_muon"} <= set(grid.rows)
    assert {run.seed for run in grid.runs()[: len(grid.rows)]} == {0}, "one seed of every row comes first"
    assert len({run.fingerprint for run in grid.runs()}) == 2 * len(grid.rows)


@pytest.mark.parametrize("size", FILE["sizes"])
def test_the_settings_name_arguments_that_exist(size: str) -> None:
    settings = grid_of("--size", size).settings["adamw"]
    inspect.signature(T5Summarizer).bind(**settings["model"])
    inspect.signature(SummarizationData).bind(**settings["data"])
    inspect.signature(table1_fit.lightning_muon.ParallelMuonStrategy).bind(**settings["strategy"])
    inspect.signature(table1_fit.Trainer).bind(**settings["trainer"])
    assert settings["strategy"]["replicate_size"] == 2


def test_a_shortened_training_has_at_most_that_many_steps() -> None:
    full = {"max_epochs": 4, "limit_train_batches": 75}
    for trainer, max_steps, expected in (
        (full, 50, (4, 12)),
        (full, 10_000, (4, 75)),
        (full, 3, (3, 1)),
        ({"max_epochs": 10}, 1, (1, 1)),
        ({"max_epochs": 10, "limit_train_batches": 0.5}, 25, (10, 2)),
    ):
        short = shortened(trainer, max_steps)
        assert (short["max_epochs"], short["limit_train_batches"]) == expected


def test_settings_of_the_command_line_reach_every_row() -> None:
    plain = grid_of()
    changed = grid_of(
        "--set", "data.source=a b.csv", "model.lr=1e-4", "--set", "row.lr_scale=0.5", "trainer.num_nodes=2"
    )
    for row in plain.labels:
        settings = changed.settings[row]
        assert settings["data"]["source"] == "a b.csv" and settings["model"]["lr"] == 1e-4
        assert settings["row"]["lr_scale"] == 0.5 and settings["trainer"]["num_nodes"] == 2
        assert changed.run(row, 0).fingerprint != plain.run(row, 0).fingerprint
    assert grid_of().run("k8", 0).fingerprint == plain.run("k8", 0).fingerprint


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "k3"], "row 'k3' does not exist"),
        (["--size", "huge"], "size 'huge' does not exist"),
        (["--set", "modle.lr=1"], "section of --set modle.lr=1: 'modle' does not exist"),
        (["--set", "model.lr"], "needs section.key=value"),
        (["--set", "lr=1"], "needs section.key=value"),
        (["--max-steps", "0"], "at least 1"),
    ],
)
def test_a_name_that_does_not_exist_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grid_of(*arguments)


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


def test_a_run_that_fails_keeps_no_other_from_running(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = grid_of("--rows", "adamw", "k4", "k8", "--seeds", "7", folder=tmp_path)

    def train(run: Run, log: Path) -> int:
        if run.row == "adamw":
            return 3
        if run.row == "k8":  # ends well, and stores a result
            append_result(tmp_path / RESULTS, result_of(run, 4.0))
        return 0

    assert [run.row for run in run_grid(grid, train, lambda: write_report(grid))] == ["adamw", "k4"]
    printed = capsys.readouterr().out
    assert "adamw seed 7" in printed and "failed with status 3" in printed
    assert "val loss 4.000" in printed
    assert "k = 8 of 64 x 64" in (tmp_path / "table1.md").read_text(), "the table of what there is"


def test_a_file_edited_while_the_grid_runs_changes_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text(CONFIG.read_text())
    options = parse(["--config", str(config), "--rows", "k2", "k4", "--seeds", "3"])
    grid = dataclasses.replace(load_grid(options, rows=options.rows, seeds=options.seeds), output_dir=tmp_path)

    def train(run: Run, log: Path, *, arguments: list[str]) -> int:
        config.write_text(config.read_text().replace("5.0e-3", "3.0e-3"))
        seen = load_grid(parse(arguments)).run(run.row, run.seed)
        append_result(tmp_path / RESULTS, result_of(seen, 4.0))
        return 0

    monkeypatch.setattr(table1, "train_in_processes", train)
    assert train_missing(grid, options, lambda: None) == []
    assert len(missing_runs(load_grid(options, rows=["k2", "k4"]))) == 4, "the edited file is other settings"


def test_speeds_come_from_short_runs_of_their_own_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "table1.yaml"
    config.write_text(CONFIG.read_text().replace("outputs/table1", str(tmp_path)))
    trained = []

    def train(run: Run, log: Path, *, arguments: list[str]) -> int:
        steps = run.settings["trainer"]["max_epochs"] * run.settings["trainer"]["limit_train_batches"]
        seen = load_grid(parse(arguments)).run(run.row, run.seed)
        append_result(tmp_path / RESULTS, result_of(seen, 4.0, steps=steps, samples_per_second=1000.0 / steps))
        trained.append((run.row, run.seed, steps))
        return 0

    monkeypatch.setattr(table1, "train_in_processes", train)
    arguments = ["--config", str(config), "--rows", "adamw", "k8", "--seeds", "3", "4"]
    assert table1.main(arguments) == 0
    table1.main([*arguments, "--speed-steps", "20"])
    assert trained == [(row, seed, 120) for seed in (3, 4) for row in ("adamw", "k8")] + [
        ("adamw", 3, 20),
        ("k8", 3, 20),
    ]
    with (tmp_path / "table1.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["samples_per_second"], line["num_seeds"]) for line in lines] == [("50.0", "2")] * 2


def test_the_rate_of_the_embedding_ignores_the_factor_of_a_row() -> None:
    assert learning_rates({"lr": 4e-3, "embedding_lr_scale": 8.0}, 0.25) == {"lr": 1e-3, "embedding_lr_scale": 32.0}


def test_the_clock_leaves_out_the_first_steps_and_validations() -> None:
    clock = StepClock(warmup_steps=2)
    assert math.isnan(clock.seconds_per_step)
    for now in (10.0, 100.0, 103.0, 104.0):  # two first steps, then 3 s and 1 s
        clock.step_ended(now)
    clock.interrupt()
    for now in (200.0, 208.0):  # the first one is measured from nothing
        clock.step_ended(now)
    assert clock.seconds_per_step == pytest.approx((3.0 + 1.0 + 8.0) / 3)


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


def test_a_command_that_fails_leaves_its_output(tmp_path: Path) -> None:
    run = grid_of().run("k8", 0)
    log = tmp_path / "log"
    assert train_in_processes(run, log, arguments=["--size", "huge"]) != 0
    assert "size 'huge' does not exist" in log.read_text()


def test_stored_results_come_back_and_half_a_line_is_survived(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    grid, path = grid_of(), tmp_path / "new" / RESULTS
    runs = grid.runs()[:3]
    results = [result_of(run, random.uniform(3, 6)) for run in runs]
    append_result(path, results[0])
    with path.open("a") as file:
        file.write('{"row": "k1", "se')  # as a process leaves it that is killed while it writes
    append_result(path, results[1])
    append_result(path, results[2])
    fingerprints = [run.fingerprint for run in runs]
    assert read_results(path, fingerprints) == dict(zip(fingerprints, results, strict=True))
    assert "results.jsonl:2 is no JSON" in caplog.text
    assert read_results(path, fingerprints[1:2]) == {fingerprints[1]: results[1]}
    assert read_results(tmp_path / "none", fingerprints) == {}


def test_a_row_of_the_table_is_the_mean_over_its_seeds() -> None:
    grid = grid_of()
    results = [
        result_of(grid.run("k4", seed), val, sent_bytes=sent, samples_per_second=speed, val_losses=[val + seed, val])
        for seed, (val, sent, speed) in enumerate([(4.0, 100.0, 20.0), (4.5, 300.0, 10.0), (4.4, 200.0, 30.0)])
    ]
    row = summarize("k4", results, lr_scale=0.5, samples_per_second=[15.0, 25.0])
    assert row.val_loss == pytest.approx((4.0 + 4.5 + 4.4) / 3)
    assert row.val_spread == pytest.approx(0.25)
    assert (row.sent_bytes, row.samples_per_second, row.num_seeds) == (200.0, 20.0, 3)
    assert row.train_loss == pytest.approx(row.val_loss - 0.5)
    assert row.val_losses == pytest.approx([(4.0 + 5.5 + 6.4) / 3, row.val_loss])


def test_the_tables_show_losses_relative_to_adamw_in_order() -> None:
    grid = grid_of("--set", "row.lr_scale=0.25")
    losses = {"k8": 4.04, "adamw": 4.0, "strip4": 3.9}
    rows = summaries(grid, [result_of(grid.run(row, 0), loss) for row, loss in losses.items()])
    lines = markdown_table(rows, grid.labels).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len({len(line) for line in cells}) == 1
    assert cells[2] == ["AdamW (HSDP)", "0.1234", "12.5", "3.500", "4.000", "+0.0%", "0.25", "1"]
    assert [line[0] for line in cells[3:]] == ["k = 4 of strips of 64", "k = 8 of 64 x 64"]
    assert [line[5] for line in cells[3:]] == ["-2.5%", "+1.0%"]
    table = list(csv.DictReader(io.StringIO(csv_text(rows, grid.labels))))
    assert [line["row"] for line in table] == ["adamw", "strip4", "k8"]
    assert float(table[2]["val_loss_vs_adamw"]) == pytest.approx(0.01)
    assert float(table[1]["sent_bytes"]) == 123_400.0
    without = summaries(grid, [result_of(grid.run("k8", 0), 4.0)])
    assert "%" not in markdown_table(without, grid.labels), "nothing to compare with"


def test_table_and_plot_show_results_of_these_settings_only(tmp_path: Path) -> None:
    grid = grid_of("--rows", "k2", "--seeds", "0", "1", folder=tmp_path)
    other = grid_of("--max-steps", "20", folder=tmp_path)
    assert write_report(grid) == []
    append_result(tmp_path / RESULTS, result_of(grid.run("adamw", 0), 5.0))
    append_result(tmp_path / RESULTS, result_of(grid.run("k2", 1), 5.5))
    append_result(tmp_path / RESULTS, result_of(other.run("k32", 0), 1.0))
    markdown, table, png = write_report(grid)
    text = markdown.read_text()
    assert "AdamW (HSDP)" in text and "k = 2 of 64 x 64" in text and "k = 32" not in text
    assert "2 nodes x 2 ranks, 40 steps of 128 samples" in text
    assert all(" ".join(sentence.split()) in text for sentence in FILE["differences"])
    assert all(" ".join(sentence.split()) in text for sentence in FILE["sizes"]["demo"]["differences"])
    assert [line["row"] for line in csv.DictReader(table.open())] == ["adamw", "k2"]
    assert png.read_bytes().startswith(b"\x89PNG")
