"""The comparison of losses: what it runs, what it keeps, and what its table says."""

import csv
import sys
from pathlib import Path

import pytest

from tests.support.programs import ROOT, run_program

SMALL = "--width 32 --layers 1 --context 16 --batch 2 --steps 3 --evaluations 3 --megabytes 0.05 --seeds 0 1"


def _run(folder: Path, *more: str) -> str:
    (folder / "text").mkdir(exist_ok=True)
    (folder / "text" / "words.txt").write_text("all work and no play makes jack a dull boy\n" * 400)
    (folder / "other.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    return run_program(
        ROOT / "benchmarks" / "loss.py", "--text", folder / "text", *SMALL.split(), "--out", folder / "out", *more,
        directory=ROOT,
    )  # fmt: skip


def test_each_run_is_tuned_and_made_once(tmp_path: Path) -> None:
    options = ("--tune", "adamw", "muon", "--rates", "0.001", "0.01", "--factors", "1", "3")
    only = ("--only", "muon", 'plain={"nesterov": false}', 'none={"no_such_option": 1}')
    said = _run(tmp_path, *options, *only)
    assert "skipped: none, since ParallelMuon has no option no_such_option" in said
    # Two rates of each grid, and two seeds of three configurations.
    files = set((tmp_path / "out").glob("all_weights-*.csv"))
    assert len(files) == 4 + 6
    rows = [line.split(" | ") for line in said.splitlines() if line.startswith(("| adamw", "| muon", "| plain"))]
    assert len(rows) == 3 and len({row[1] for row in rows}) == 1
    assert rows[0][2] == "-" and rows[1][2] == rows[2][2] in ("1", "3")
    with (tmp_path / "out" / "losses.csv").open(newline="") as file:
        losses = list(csv.DictReader(file))
    assert len(losses) == 6 * 4 and {row["step"] for row in losses} == {"0", "1", "2", "3"}
    again = _run(tmp_path, *options, *only, "--picture", str(tmp_path / "losses.svg"))
    assert again.count("all_weights") == 0 and said.endswith(again[again.index("\nall weights") :])
    picture = (tmp_path / "losses.svg").read_text()
    assert all(f">{name}</text>" in picture for name in ("adamw", "muon", "plain", "seconds of training"))
    # Nothing else is drawn in the colours of the configurations: in both halves two seeds, and an entry of the legend.
    assert [picture.count(f"stroke: {color}") for color in ("#1f77b4", "#ff7f0e", "#2ca02c")] == [5, 5, 5]
    assert _run(tmp_path, "--seeds", "2", "--workers", "2", *options, *only).count("all_weights") == 3
    assert len(set((tmp_path / "out").glob("all_weights-*.csv")) - files) == 3


def test_fine_tuning_begins_with_one_model_of_adamw(tmp_path: Path) -> None:
    said = _run(
        tmp_path, "--finetune", str(tmp_path / "other.txt"), "--first-steps", "3", "--only", "muon", "Muon on B"
    )
    assert said.count("first-adamw") == 1 and said.count("| muon |") == 2
    assert said.count("| Muon on B |") == 1, "all weights have no factors"
    with (tmp_path / "out" / "losses.csv").open(newline="") as file:
        losses = [row for row in csv.DictReader(file) if row["step"] == "0"]
    # LoRA changes nothing at first, and neither optimizer nor seed does.
    assert {row["mode"] for row in losses} == {"all weights", "LoRA"}
    assert len({row["loss"] for row in losses}) == 1 and len({row["loss on the first text"] for row in losses}) == 1


def test_an_unknown_configuration_ends_with_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import loss

    monkeypatch.setattr(sys, "argv", ["loss.py", "--only", "muom"])
    with pytest.raises(SystemExit, match=r"no configuration 'muom'; there are adamw, muon"):
        loss.main()
