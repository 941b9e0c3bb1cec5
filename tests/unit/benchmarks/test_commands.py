"""Benchmarks that are commands: what they take, and what they make of numbers."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.programs import ROOT, run_program
from tests.support.warm_python import warm_python

# All in one process, since importing takes longer than what they do.
PROGRAM = """
import runpy, sys
from pathlib import Path
for path in sys.argv[1:]:
    sys.argv, sys.path[0] = [path, "--help"], str(Path(path).parent)
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        assert not end.code, path
"""


def test_commands_explain_themselves(tmp_path: Path) -> None:
    paths = [path for path in (ROOT / "benchmarks").glob("*.py") if "ArgumentParser(" in path.read_text()]
    (tmp_path / "program.py").write_text(PROGRAM)
    said = run_program(tmp_path / "program.py", *paths, directory=ROOT)
    assert all(f"usage: {path.name}" in said for path in paths)


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import gpu
    return gpu


def _result(**parts: Any) -> dict[str, Any]:
    return {"card": "Card 7", "date": "2026-01-01", "parts": parts}


ROWS = [
    {"what": "rate", "figure": "7 TFLOP/s", "held": None},
    {"what": "bits", "figure": "True", "held": True},
    {"what": "waits", "figure": "a.py:3", "held": False},
]


def test_all_parts_run_on_a_cpu_and_keep_promises(gpu: ModuleType, tmp_path: Path) -> None:
    command = [warm_python(), "benchmarks/gpu.py", "--device", "cpu", "--small", "--out", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=300)
    # It ends with 1 if a promise is broken or a part fails.
    assert ended.returncode == 0, ended.stdout
    result = json.loads((tmp_path / "cpu.json").read_text())
    assert list(result["parts"]) == list(gpu.PARTS)
    assert all(part["rows"] for part in result["parts"].values())


def test_broken_promises_and_parts_without_an_end_are_named(gpu: ModuleType) -> None:
    result = _result(waiting={"rows": ROWS}, dct={"rows": [], "error": "not done after 60 s"})
    assert gpu.broken(result) == ["waiting: waits", "dct: not done after 60 s"]
    assert "| waiting | waits | a.py:3 | **broken** |" in gpu.table(result)


def test_a_table_takes_the_place_of_the_one_of_the_same_card(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "performance.md"
    page.write_text("# Performance\n\n## On cards\n\nText.\n\n## After\n\nMore.\n")
    monkeypatch.setattr(gpu, "PAGE", page)
    gpu.include(_result(old={"rows": ROWS}))
    gpu.include(_result(waiting={"rows": ROWS}) | {"card": "Card 8"})
    gpu.include(_result(dct={"rows": ROWS}))
    text = page.read_text()
    assert text.count("### Card 7") == text.count("### Card 8") == 1
    assert "| dct |" in text and "| old |" not in text
    assert text.index("Text.") < text.index("### Card 8") < text.index("## After") < text.index("More.")


@pytest.fixture(scope="module")
def slow_network() -> ModuleType:
    pytest.importorskip("transformers")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import slow_network
    return slow_network


def test_rates_are_bits_per_second(slow_network) -> None:
    assert [slow_network.parse_rate(text) for text in ("unlimited", "10mbit", "2.5gbit")] == [None, 1e7, 2.5e9]
    for text in ("100", "fast", "-1mbit", "0mbit", "mbit"):
        with pytest.raises(ValueError, match=r"a rate is .* got"):
            slow_network.parse_rate(text)


def test_the_table_compares_with_hsdp_and_says_what_failed(slow_network) -> None:
    def row(*seconds: float, sent: float, loss: float) -> dict:
        return {"lr": 0.003, "loss": loss, "rates": [{"seconds": each, "sent": sent + each} for each in seconds]}

    rows = {
        slow_network.BASELINE: row(0.5, 3.6, sent=40e6, loss=5.0),
        "mine": row(0.25, 0.36, sent=312_345, loss=5.125),
        "other": {"failed": "exit status 1"},
    }
    lines = slow_network.table(rows, ["unlimited", "100mbit"], 60).splitlines()
    assert lines[3] == "| mine | 0.250 (2.0x) | 0.360 (10.0x) | 0.31 | 5.125 | 0.003 |"
    assert lines[4].startswith("| other | exit status 1 |")
    assert len({line.count("|") for line in lines}) == 1
    rows = {"mine": {"lr": 0.001, "loss": None, "rates": [{"seconds": 0.25, "sent": 1e6}]}}
    lines = slow_network.table(rows, ["1gbit"], 0).splitlines()
    assert lines == ["| contender | s per step, 1gbit | MB sent |", "| --- | --- | --- |", "| mine | 0.250 | 1.00 |"]


def test_contenders_are_chosen_by_words(slow_network, capsys) -> None:
    assert slow_network.chosen(["k=4", "HSDP + AdamW"], with_peer=False) == [
        "HSDP + AdamW",
        "HSDP + AdamW, gradients reduced in bf16",
    ]
    assert "DeToNATION 0.5.2 sgd, k=4" in capsys.readouterr().err
    assert len(slow_network.chosen(["detonation"], with_peer=True)) == 2
    with pytest.raises(SystemExit, match="none of these"):
        slow_network.chosen(["nothing like it"], with_peer=True)


def test_without_namespaces_nothing_is_measured(slow_network, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["slow_network.py", "--quick"])
    monkeypatch.setattr(slow_network, "why_not", lambda: "network namespaces need root")
    monkeypatch.setattr(slow_network, "run", lambda *_: pytest.fail("it measured"))
    slow_network.main()
    assert capsys.readouterr().out == "skipped: network namespaces need root\n"


def test_waiting_ends_with_a_failure_or_the_time(slow_network) -> None:
    def start(script: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sh", "-c", script])

    endless = start("exec sleep 60")
    try:
        assert slow_network.wait([start("true"), start("sleep 0.1")], 20) is None
        assert slow_network.wait([endless, start("exit 3")], 20) == "exit status 3"
        assert slow_network.wait([endless, start("true")], 0.2) == "not done after 0 s"
    finally:
        endless.kill()
        endless.wait()
