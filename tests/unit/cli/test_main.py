"""The command, run as a user would."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import lightning_muon
from lightning_muon.cli import main as command
from tests.support.programs import program_environment, run_program
from tests.unit.refusals.commands import CONFIG, NET, STRATEGY

_OPTIMIZER = """
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.01}}
lr_scheduler: {class_path: torch.optim.lr_scheduler.StepLR, init_args: {step_size: 1}}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {"refused_net.py": NET, "config.yaml": CONFIG, "strategy.yaml": STRATEGY, "optimizer.yaml": _OPTIMIZER}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_print_config_shows_the_strategy(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as exiting:
        command.main(["fit", "--config", "config.yaml", "--print_config"])
    assert not exiting.value.code and "strategy: parallel_muon" in capsys.readouterr().out


def test_fit_and_test_take_strategy_and_optimizer_from_yaml(project: Path) -> None:
    def run(*words: str) -> str:
        return run_program("-m", "lightning_muon", *words, directory=project, num_ranks=2)

    files = ("config.yaml", "strategy.yaml", "optimizer.yaml")
    text = run("fit", *(word for file in files for word in ("--config", file)))
    assert "adamw_patterns" in text and "AdamW -> ParallelMuon for matrices" in text
    version = project / "lightning_logs" / "version_0"
    assert (version / "config.yaml").is_file()
    (checkpoint,) = (version / "checkpoints").iterdir()
    assert checkpoint.is_file()
    assert "Test metric" in run("test", "--config", "config.yaml", "--ckpt_path", str(checkpoint))


_BLOCKED = """
import contextlib, io, sys

ended = []
for words, blocked in CASES:
    for name in list(sys.modules):  # A warm interpreter, and the case before, have imported them.
        if name.partition(".")[0] in ("lightning_muon", *blocked):
            del sys.modules[name]
    sys.modules.update(dict.fromkeys(blocked))
    sys.argv, code, printed = ["lightning-muon", *words], 0, io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            from lightning_muon.cli.main import main
            main()
        except SystemExit as exiting:
            code = exiting.code
            if isinstance(code, str):
                print(code)
    ended.append((code, printed.getvalue()))
print(repr(ended))
"""


_FRAMEWORKS = ("lightning", "pytorch_lightning", "accelerate", "jsonargparse", "yaml")
# Words of the command, packages that are not installed, and the extra that is missed.
_CASES = [
    (("fit", "--config", "config.yaml"), ("lightning", "pytorch_lightning"), "lightning"),
    (("fit", "--config", "config.yaml"), ("jsonargparse",), "lightning"),
    (("plan", "--config", "config.yaml"), ("lightning", "pytorch_lightning"), "lightning"),
    (("convert", "a", "b"), _FRAMEWORKS, "lightning"),
    (("plan", "--shapes", "t5-small", "--draw", "a.png"), ("matplotlib",), "plots"),
    (("launch", "script.py"), ("accelerate",), "accelerate"),
]
_ALL = ("torch", "lightning_fabric", "transformers", *_FRAMEWORKS)
_NEED_NONE = [(("plan", "--shapes", "t5-small"), _FRAMEWORKS), (("--help",), _ALL), (("--version",), _ALL)]


def test_a_missing_extra_is_one_line_and_help_and_plan_need_none(project: Path) -> None:
    cases = [*(case[:2] for case in _CASES), *_NEED_NONE]
    (project / "blocked.py").write_text(f"CASES = {cases!r}\n{_BLOCKED}")
    how: Any = {"cwd": project, "env": program_environment(), "capture_output": True, "text": True, "timeout": 100.0}
    done = subprocess.run([sys.executable, "blocked.py"], check=False, **how)
    assert done.returncode == 0, done.stderr
    *refused, plan, (code, text), version = ast.literal_eval(done.stdout)
    assert not plan[0] and "Owners in each replica" in plan[1]
    names = ["fit", "validate", "test", "predict", "plan", "convert", "doctor", "verify", "launch"]
    assert not code and [line.split()[0] for line in text.partition("COMMAND\n")[2].splitlines()] == names
    assert version == (0, f"{lightning_muon.__version__}\n")
    for (words, _, extra), (code, text) in zip(_CASES, refused, strict=True):
        assert code == 2 and len(text.splitlines()) == 1, words
        assert f'pip install "lightning-muon[{extra}]"' in text


def test_only_our_words_stand_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for raised, expected in ((ValueError("of a mesh"), ValueError), (TypeError("not iterable"), TypeError)):
        monkeypatch.setattr("lightning_muon.cli.verify._checkpoints", mock.Mock(side_effect=raised))
        monkeypatch.setattr("lightning_muon.cli.launch.run_by_us", mock.Mock(side_effect=raised))
        for words in (["verify", "path"], ["launch", "--cpu", "--num_processes", "2", __file__]):
            with pytest.raises(expected):
                command.main(words)
