"""The demo of AdamW against Muon, from its sentences to its report."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from recipes.t5_summarization.docstrings import Pair, cache_file
from recipes.vowels.data import PACKAGES, folders_of
from tests.support.programs import program_environment


@pytest.mark.long
def test_the_demo_draws_both_trainings_and_reports_them(tmp_path: Path) -> None:
    # Sentences in the place of those that a harvest of the packages would find.
    verbs, nouns = ("Return", "Remove", "Compute", "Replace"), ("number", "name", "value", "shape", "length")
    texts = [f"{verb} the {noun} of item number {n}." for verb in verbs for noun in nouns for n in range(10)]
    pairs = [Pair(module=f"file_{n % 37}.py", source="", target=text) for n, text in enumerate(texts)]
    path = cache_file(tmp_path, folders_of(PACKAGES))
    path.write_text("".join(json.dumps(asdict(pair)) + "\n" for pair in pairs))
    options = {
        "trainer.devices": "2",
        "trainer.max_steps": "6",
        "trainer.val_check_interval": "2",
        "trainer.enable_progress_bar": "false",
        "model.init_args.width": "16",
        "data.init_args.cache_dir": str(tmp_path),
    }
    command = [sys.executable, "-m", "recipes.vowels.demo", *(f"--{name}={value}" for name, value in options.items())]
    how: Any = {"cwd": tmp_path, "env": program_environment(), "capture_output": True, "text": True}
    asked = subprocess.run([*command[:3], "--help"], check=False, **how)
    assert asked.returncode == 0 and "--trainer.max_steps" in asked.stdout, asked.stderr
    ended = subprocess.run(command, check=False, **how)
    assert ended.returncode == 0, ended.stderr
    report = ended.stdout[ended.stdout.index("hidden  ") :]
    for line, start in enumerate(("hidden", "AdamW", "Muon", "right")):
        assert report.splitlines()[line].startswith(start)
    for title in ('AdamW, strategy="ddp"', 'strategy="parallel_muon"'):
        row = next(line for line in report.splitlines() if line.startswith(title))
        assert 0 < float(row.removeprefix(title).split()[0]) < 3
    picture = tmp_path / report.split("Both curves: ")[1].splitlines()[0]
    assert picture.read_bytes().startswith(b"\x89PNG")
