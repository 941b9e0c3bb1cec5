"""Shape files: they list the parameters of a model, so that ``lightning-muon plan`` does not need the model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast, get_args

from lightning_muon.config import nearest, unknown_option
from lightning_muon.params.layers import ParameterKind
from lightning_muon.params.routing import Route

FOLDER = Path(__file__).with_name("shape_files")
_KINDS = get_args(ParameterKind)


@dataclass(frozen=True, kw_only=True)
class ParameterShape(Route):
    """One parameter of a model that is planned without being built."""

    shape: tuple[int, ...]  # Global shape.
    shard_dim: int = 0  # Dimension along which FSDP2 cuts it.
    frozen: bool = False  # Whether it is not trained.

    def __post_init__(self) -> None:
        where = f"parameter {self.name!r} {self.shape}"
        if self.kind not in _KINDS:
            raise ValueError(f"{where}: kind must be one of {_KINDS}, got {self.kind!r}{_nearest(self.kind, _KINDS)}")
        if any(type(size) is not int or size < 0 for size in (*self.shape, *self.splits)):
            raise ValueError(f"{where}: sizes must be integers >= 0, splits are {self.splits}")
        smallest = {"matrix": 2, "convolution": 2, "stack": 3, "elementwise": 0}[self.kind]
        if len(self.shape) < smallest or (self.kind == "matrix" and len(self.shape) != 2):
            raise ValueError(f"{where} is {len(self.shape)}-D and cannot be of kind {self.kind!r}")
        for key in ("frozen", "is_transposed"):
            if type(getattr(self, key)) is not bool:
                raise ValueError(f"{where}: {key} must be true or false, got {getattr(self, key)!r}")
        for key in ("split_dim", "shard_dim"):
            last, value = max(len(self.shape) - 1, 0), getattr(self, key)
            if type(value) is not int or not 0 <= value <= last:
                raise ValueError(f"{where}: {key} must be an integer in [0, {last}], got {value!r}")
        if self.splits and sum(self.splits) != self.shape[self.split_dim]:
            raise ValueError(f"{where}: splits {self.splits} do not sum to dimension {self.split_dim}")


@dataclass(frozen=True, kw_only=True)
class ModelShapes:
    """The parameters of a model."""

    name: str  # For titles.
    source: str  # Where the dimensions come from.
    parameters: tuple[ParameterShape, ...]  # In the order of the forward pass.


def shipped_shapes() -> dict[str, Path]:
    """Name -> file of the models that come with the package."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.json"))}


def read_shapes(source: str | Path) -> ModelShapes:
    """Read a shape file: a path, or the name of a file that comes with the package, with or without ``.json``.

    A ``ValueError`` names the file and the wrong key, kind or shape.
    """
    path, shipped = Path(source), shipped_shapes()
    if not path.is_file():
        name = path.name.removesuffix(".json")
        if name not in shipped:
            raise FileNotFoundError(
                f"there is no shape file {source}{_nearest(name, shipped)}; the package has {', '.join(shipped)}"
            )
        path = shipped[name]
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    try:
        return _model(content)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _model(content: object) -> ModelShapes:
    checked = _checked(content, ("name", "source", "parameters"), "the file", required=("name", "parameters"))
    parameters = tuple(_parameters(checked["parameters"]))
    if not parameters:
        raise ValueError("parameters is empty")
    names = [parameter.name for parameter in parameters]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two parameters have the name {twice!r}; repeated layers need {{i}} in their names")
    return ModelShapes(name=str(checked["name"]), source=str(checked.get("source", "")), parameters=parameters)


def _parameters(entries: Any) -> Iterable[ParameterShape]:
    """Parameters of ``entries``; ``{"repeat": n, "parameters": [...]}`` is n layers, ``{i}`` the number of a layer."""
    keys = [field.name for field in fields(ParameterShape)]
    for entry in entries:
        if "repeat" in entry:
            block = _checked(entry, ("repeat", "first", "parameters"), "a block", required=("parameters",))
            layers, first = list(_parameters(block["parameters"])), block.get("first", 0)
            for i in range(first, first + block["repeat"]):
                for layer in layers:
                    yield replace(layer, name=layer.name.replace("{i}", str(i)))
        else:
            values = _checked(entry, keys, "a parameter", required=("name", "shape", "kind"))
            tuples: dict[str, Any] = {key: tuple(values[key]) for key in ("shape", "splits") if key in values}
            yield ParameterShape(**{**values, **tuples})


def _checked(content: object, allowed: Sequence[str], what: str, *, required: Sequence[str]) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError(f"{what} must be an object with the keys {', '.join(allowed)}, got {content!r}")
    found = cast("dict[str, Any]", content)
    for key in found:
        if key not in allowed:
            raise ValueError(f"{what}: {unknown_option(key, allowed)}")
    for key in required:
        if key not in found:
            raise ValueError(f"{what} has no key {key!r}: {str(found)[:120]}")
    return found


def _nearest(wrong: object, right: Iterable[str]) -> str:
    found = nearest(str(wrong), list(right))
    return "" if found is None else f" (did you mean {found!r}?)"
