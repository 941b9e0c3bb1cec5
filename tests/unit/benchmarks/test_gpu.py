"""The session for one card runs without one, and tells what does not hold."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.programs import ROOT
from tests.support.warm_python import warm_python


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


def test_parts_run_on_a_cpu_and_leave_their_rows(tmp_path: Path) -> None:
    parts = ["waiting", "steps"]
    command = [warm_python(), "benchmarks/gpu.py", "--device", "cpu", "--small", "--parts", ",".join(parts)]
    subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, check=True, capture_output=True, timeout=150)
    result = json.loads((tmp_path / "cpu.json").read_text())
    assert list(result["parts"]) == parts
    assert all("error" not in part and part["rows"] for part in result["parts"].values())


def test_broken_promises_and_parts_without_an_end_are_named(gpu: ModuleType) -> None:
    result = _result(waiting={"rows": ROWS}, race={"rows": [], "error": "not done after 60 s"})
    assert gpu.broken(result) == ["waiting: waits", "race: not done after 60 s"]
    assert "| waiting | waits | a.py:3 | **broken** |" in gpu.table(result)


def test_a_table_takes_the_place_of_the_one_of_the_same_card(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "performance.md"
    page.write_text("# Performance\n\n## On cards\n\nText.\n\n## After\n\nMore.\n")
    monkeypatch.setattr(gpu, "PAGE", page)
    gpu.include(_result(old={"rows": ROWS}))
    gpu.include(_result(waiting={"rows": ROWS}) | {"card": "Card 8"})
    gpu.include(_result(race={"rows": ROWS}))
    text = page.read_text()
    assert text.count("### Card 7") == text.count("### Card 8") == 1
    assert "| race |" in text and "| old |" not in text
    assert text.index("Text.") < text.index("### Card 8") < text.index("## After") < text.index("More.")
