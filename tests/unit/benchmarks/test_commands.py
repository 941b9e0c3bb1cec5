"""Benchmarks that are commands: what they take, and that they run."""

import json
import subprocess
from pathlib import Path
from types import ModuleType

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


def test_all_parts_run_on_a_cpu_and_keep_promises(gpu: ModuleType, tmp_path: Path) -> None:
    command = [warm_python(), "benchmarks/gpu.py", "--device", "cpu", "--small", "--out", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=300)
    # It ends with 1 if a promise is broken or a part fails.
    assert ended.returncode == 0, ended.stdout
    result = json.loads((tmp_path / "cpu.json").read_text())
    assert list(result["parts"]) == list(gpu.PARTS)
    assert all(part["rows"] for part in result["parts"].values())
