from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightning_muon.engine.parsing import build, read_yaml


@dataclass
class _Engine:
    power_watts: float
    name: str = "plain"


@dataclass
class _Car:
    engine: Any = None
    wheels: tuple[int, ...] = ()


_ENGINE = f"{__name__}._Engine"


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"whels": []}, "^f: there is no option 'whels'; did you mean 'wheels'"),
        ({"wheels": ["round"]}, "(?s)^f: .*wheels"),
        ([1], r"^f: must be a mapping of options, got \[1\]"),
        ({"engine": {"class_path": _ENGINE, "init_arg": {}}}, "^f: engine: .*'init_arg'; did you mean 'init_args'"),
        ({"engine": {"class_path": _ENGINE, "name": "x"}}, "^f: engine: .*'name'; it belongs under init_args:"),
        ({"engine": {"class_path": _ENGINE}}, "^f: engine: .*power_watts"),
        ({"engine": {"class_path": "os.path.join"}}, "'os.path.join' names no class$"),
        ({"engine": {"class_path": "lightning_muon.DCTTopp"}}, "names no class; did you mean 'DCTTopK'"),
        ({"engine": {"class_path": "no_such.Thing"}}, "^f: engine: class_path 'no_such.Thing' cannot be imported"),
        ({"engine": {"class_path": None}}, "class_path None names no class"),
    ],
)
def test_errors_name_the_place_and_the_nearest_key(mapping: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(_Car, mapping, where="f")


def test_only_a_yaml_mapping_is_read(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("a: 1\n")
    assert read_yaml(path) == {"a": 1}
    path.write_text("# nothing\n")
    assert read_yaml(path) == {}
    for text in ("a: [1", "- 1\n"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"options\.yaml"):
            read_yaml(path)
    with pytest.raises(FileNotFoundError, match=r"missing\.yaml"):
        read_yaml(tmp_path / "missing.yaml")
