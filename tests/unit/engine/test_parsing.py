from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lightning_muon import DCTTopK
from lightning_muon.engine.parsing import build, build_class, read_yaml


@dataclass
class _Engine:
    power_watts: float
    name: str = "plain"


@dataclass
class _Car:
    engine: Any = None
    wheels: tuple[int, ...] = ()
    colours: dict[str, int] = field(default_factory=dict)


_ENGINE = f"{__name__}._Engine"


def test_values_get_the_types_of_the_parameters() -> None:
    mapping = {"wheels": [1, 2], "colours": {"red": 3}}
    assert build(_Car, mapping, where="f") == _Car(wheels=(1, 2), colours={"red": 3})
    assert build(_Engine, {"power_watts": "1e3"}, where="f") == _Engine(1000.0)
    engine = _Engine(1.0)
    assert build(_Car, {"engine": engine, "wheels": [1]}, where="f").engine is engine


def test_objects_are_built_from_their_class_path_at_any_depth() -> None:
    nested = {"class_path": _ENGINE, "init_args": {"power_watts": 7}}
    assert build(_Car, {"engine": nested}, where="f").engine == _Engine(7.0)
    inner = {"class_path": f"{__name__}._Car", "init_args": {"engine": nested, "wheels": [4]}}
    assert build(_Car, {"engine": inner}, where="f").engine == _Car(_Engine(7.0), (4,))
    # A name without dots is one of this package.
    assert build(_Car, {"engine": {"class_path": "DCTTopK"}}, where="f").engine == DCTTopK()


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


def test_the_class_is_the_first_one_that_has_all_keys() -> None:
    kinds = (_Engine, _Car)
    assert build_class({"name": "x", "power_watts": 2}, kinds, where="f") == _Engine(2.0, "x")
    assert build_class({"wheels": [1]}, kinds, where="f") == _Car(wheels=(1,))
    assert build_class({"class_path": f"{__name__}._Car"}, kinds, where="f") == _Car()
    with pytest.raises(ValueError, match=r"f \(_Car\): there is no option 'name'; it belongs to _Engine"):
        build_class({"wheels": 1, "engine": 2, "name": "x"}, kinds, where="f")


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
