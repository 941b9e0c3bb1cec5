"""The results of Table 1: how they are stored, and the table and plot that are made of them."""

import csv
import io
import random
from pathlib import Path

import pytest
import yaml

from recipes.t5_summarization.table1_config import CONFIG
from recipes.t5_summarization.table1_report import csv_text, markdown_table, summaries, write_report
from recipes.t5_summarization.table1_results import RESULTS, append_result, read_results, summarize
from tests.recipes.table1_runs import grid_of, result_of

FILE = yaml.safe_load(CONFIG.read_text())


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
