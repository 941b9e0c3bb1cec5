"""A script is run as Python itself would run it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_muon.cli import run_script

_SCRIPT = """
import sys
from pathlib import Path
import neighbour
Path(sys.argv[1]).write_text(f"{__name__} {neighbour.VALUE} {sys.argv[2:]}")
"""


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Counts that the Accelerator is replaced, which would outlast the test; undoes what else is changed."""
    seen: list[str] = []
    monkeypatch.setattr(run_script, "replace_accelerator", lambda: seen.append("accelerate"))
    monkeypatch.setattr(sys, "argv", ["python"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "neighbour", raising=False)
    return seen


@pytest.mark.parametrize("is_module", [False, True])
def test_a_script_finds_its_neighbours_and_its_arguments(tmp_path: Path, replaced: list[str], is_module: bool) -> None:
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "train.py").write_text(_SCRIPT)
    (folder / "neighbour.py").write_text("VALUE = 5\n")
    if is_module:
        sys.path.insert(0, str(folder))
    words = ["-m", "train"] if is_module else [str(folder / "train.py")]
    run_script.main([*words, str(tmp_path / "out"), "--lr", "1"])
    assert (tmp_path / "out").read_text() == "__main__ 5 ['--lr', '1']"
    assert replaced == ["accelerate"]


def test_no_script_is_an_error(replaced: list[str]) -> None:
    for words in ([], ["-m"]):
        with pytest.raises(SystemExit, match="usage"):
            run_script.main(words)
    assert not replaced
