"""Every benchmark that is a command starts, and says what it takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.programs import ROOT, run_program

COMMANDS = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py") if "ArgumentParser(" in path.read_text())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_explains_itself(name: str, tmp_path: Path) -> None:
    assert "usage: " in run_program(ROOT / "benchmarks" / name, "--help", directory=tmp_path)
