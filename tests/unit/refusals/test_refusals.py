"""What is refused, in one process; that all ranks raise together is in tests/integration/test_disagreements.py.

Each row of the tables is a test.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.refusals.commands import COMMANDS, CONFIG, FILES, NET
from tests.unit.refusals.models import MODELS
from tests.unit.refusals.options import KEYWORDS, MAPPINGS, OPTIONS
from tests.unit.refusals.strategies import STRATEGIES


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"refused_net.py": NET, "config.yaml": CONFIG, "cost.json": '{"flops_per_secnd": 1}'}
    vector = {"name": "norm", "shape": [3], "kind": "elementwise"}
    files["vector.json"] = json.dumps({"name": "vector", "parameters": [vector]})
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sys.argv", ["lightning-muon"])
    for name in ("LIGHTNING_MUON_CONFIG", "LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def _rows() -> list[Any]:
    tables = OPTIONS | KEYWORDS | MAPPINGS | FILES | COMMANDS | STRATEGIES | MODELS
    return [
        pytest.param(table.call, arguments, words, table.error, id=f"{name}: {words[:40]}")
        for name, table in tables.items()
        for arguments, words in table.rows
    ]


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter:UserWarning")
@pytest.mark.parametrize(("call", "arguments", "words", "error"), _rows())
def test_it_is_refused(call: Callable[..., Any], arguments: Any, words: str, error: Any) -> None:
    positional = arguments if isinstance(arguments, tuple) else () if isinstance(arguments, dict) else (arguments,)
    with pytest.raises(error, match=words):
        call(*positional, **(arguments if isinstance(arguments, dict) else {}))
