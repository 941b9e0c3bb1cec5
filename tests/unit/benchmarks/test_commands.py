"""Each benchmark runs, with the fewest steps, and prints its table."""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as gpu
from tests.support.processes import ProcessPool
from tests.support.programs import ROOT, program_environment

SHAPES = {
    "name": "tiny",
    "source": "",
    "parameters": [
        *({"name": f"{number}.up", "shape": [48, 32], "kind": "matrix"} for number in range(4)),
        {"name": "norm", "shape": [32], "kind": "elementwise"},
    ],
}
TUNED = "--only muon --tune adamw muon --rates 1e-3 1e-2 --factors 1 3"
TINY = "--width 32 --layers 1 --context 16 --batch 2 --steps 3 --evaluations 3 --megabytes 0.05 --seeds 0 1"
# Name, arguments, and a part of what it prints.
COMMANDS = [
    ("optimizer_step", "--meshes 2 --shapes tiny --rounds 1", "| 2 | floor: Newton-Schulz alone, reference |"),
    ("gradient_sync", "--ranks 2 --rounds 1 --steps 1 --layers 1 --width 32 --words 50 --only zero2", "| 2 | zero2 +"),
    ("pipeline", "--ranks 2 --microbatches 2 --milliseconds 1 --rounds 1 --steps 1 --schedules zb_h1", "| zb_h1 |"),
    ("loss", f"--text TMP/words.txt {TINY} {TUNED} --out TMP", ""),
    ("plan_accuracy", "--ranks 2 --rounds 1 --shapes TMP/tiny.json --out TMP", "| overlapped |"),
    ("newton_schulz", "--shapes 64x96 2x32x48 --dtypes float32 --seconds 0.01", "| 2x32x48 | float32 |"),
]
SLOW = "--ranks-per-node 1 --rates 1gbit --steps 2 --layers 1 --contenders sgd"
PROCESSES = [
    ("slow_network", SLOW, "| FlexDeMo sgd, k=8 |"),
    ("loss", f"{TINY} --nodes 2 --out TMP", "| flexdemo | 0.004 | auto |"),
    ("gpu", "--device cpu --small --out TMP", "| trainer | zero2, same bits after a resume | True | kept |"),
]


@pytest.mark.parametrize(("name", "words", "said"), COMMANDS, ids=[name for name, *_ in COMMANDS])
def test_a_program_runs(
    gloo: ProcessPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, name: str, words: str, said: str
) -> None:
    (tmp_path / "words.txt").write_text("all work and no play makes jack a dull boy\n" * 400)
    (tmp_path / "tiny.json").write_text(json.dumps(SHAPES))
    program = importlib.import_module(f"benchmarks.{name}")

    def run(function: Callable[..., Any], *arguments: Any, num_ranks: int) -> Any:
        return gloo.run(function, *arguments, world_size=num_ranks)[0]

    monkeypatch.setattr(program, "run_on_ranks", run, raising=False)
    monkeypatch.setattr("sys.argv", [name, *words.replace("TMP", str(tmp_path)).split()])
    program.main()
    assert said in capsys.readouterr().out
    if name == "loss":  # Two rates, two factors, and two seeds of both.
        assert len(list(tmp_path.glob("gpt-*.csv"))) == 4 + 4
    if name == "plan_accuracy":
        assert json.loads((tmp_path / "cost.json").read_text())["flops_per_second"] > 0
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        kinds = {event["cat"] for event in events if event["ph"] == "X"}
        assert kinds == {"momentum", "gather", "newton_schulz", "scatter", "update", "adamw"}


@pytest.mark.long
@pytest.mark.parametrize(("name", "words", "said"), PROCESSES, ids=[name for name, *_ in PROCESSES])
def test_a_program_starts_processes(tmp_path: Path, name: str, words: str, said: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", *words.replace("TMP", str(tmp_path)).split()]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 150, "check": False}
    ended = subprocess.run(command, cwd=ROOT, env=program_environment(), **options)
    # The one for cards ends with 1 if a promise is broken or a part fails.
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert said in ended.stdout or ended.stdout.startswith("skipped: "), ended.stdout


def test_broken_promises_and_parts_without_an_end_are_named() -> None:
    rows = [{"what": "bits", "figure": "True", "held": True}, {"what": "waits", "figure": "a.py:3", "held": False}]
    parts = {"waiting": {"rows": rows}, "steps": {"rows": [], "error": "not done after 60 s"}}
    assert gpu.broken({"parts": parts}) == ["waiting: waits", "steps: not done after 60 s"]
    assert "| waiting | waits | a.py:3 | **broken** |" in gpu.table({"parts": parts})
