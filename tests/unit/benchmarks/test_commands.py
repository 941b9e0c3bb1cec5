"""Every benchmark that is a command starts, and says what it takes."""

from __future__ import annotations

from pathlib import Path

from tests.support.programs import ROOT, run_program

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
