"""Shape files: they list the parameters of a model, so that ``lightning-muon plan`` does not need the model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from lightning_muon.config import check_flag, check_one_of, check_whole, nearest, takes_options
from lightning_muon.params.layers import ParameterKind
from lightning_muon.params.routing import Route

FOLDER = Path(__file__).with_name("shape_files")


@takes_options()
@dataclass(frozen=True, kw_only=True)
class ParameterShape(Route):
    """One parameter of a model that is planned without being built."""

    shape: tuple[int, ...]  # Global shape.
    shard_dim: int = 0  # Dimension along which FSDP2 cuts it.
    frozen: bool = False  # Whether it is not trained.

    def __post_init__(self) -> None:
        check_one_of("kind", self.kind, get_args(ParameterKind))
        for size in (*self.shape, *self.splits):
            check_whole("sizes", size, at_least=0)
        smallest = {"matrix": 2, "convolution": 2, "stack": 3, "elementwise": 0}[self.kind]
        if len(self.shape) < smallest or (self.kind == "matrix" and len(self.shape) != 2):
            raise ValueError(f"{self.shape} is {len(self.shape)}-D and cannot be of kind {self.kind!r}")
        check_flag("frozen", self.frozen)
        check_flag("is_transposed", self.is_transposed)
        for key in ("split_dim", "shard_dim"):
            check_one_of(key, getattr(self, key), range(max(len(self.shape), 1)))
        if self.splits and sum(self.splits) != self.shape[self.split_dim]:
            raise ValueError(f"splits {self.splits} do not sum to dimension {self.split_dim} of {self.shape}")


@takes_options()
@dataclass(frozen=True, kw_only=True)
class ModelShapes:
    """The parameters of a model."""

    name: str  # For titles.
    source: str = ""  # Where the dimensions come from.
    parameters: tuple[ParameterShape, ...]  # In the order of the forward pass.

    def __post_init__(self) -> None:
        if not self.parameters:
            raise ValueError("parameters is empty")
        name, times = Counter(parameter.name for parameter in self.parameters).most_common(1)[0]
        if times > 1:
            raise ValueError(f"two parameters have the name {name!r}; repeated layers need {{i}} in their names")


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
            meant = nearest(name, list(shipped))
            raise FileNotFoundError(
                f"there is no shape file {source}{f' (did you mean {meant!r}?)' if meant else ''}; "
                f"the package has {', '.join(shipped)}"
            )
        path = shipped[name]
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return ModelShapes(**{**content, "parameters": tuple(_parameters(content["parameters"]))})
    except KeyError as error:
        raise ValueError(f"{path}: there is no key {error}") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _parameters(entries: Iterable[Mapping[str, Any]]) -> Iterable[ParameterShape]:
    """Parameters of ``entries``; ``{"repeat": n, "parameters": [...]}`` is n layers, ``{i}`` the number of a layer."""
    for entry in entries:
        if "repeat" in entry:
            layers, first = list(_parameters(entry["parameters"])), entry.get("first", 0)
            for i in range(first, first + entry["repeat"]):
                for layer in layers:
                    yield replace(layer, name=layer.name.replace("{i}", str(i)))
            continue
        tuples = {key: tuple(entry[key]) for key in ("shape", "splits") if key in entry}
        try:
            yield ParameterShape(**{**entry, **tuples})
        except ValueError as error:
            raise ValueError(f"parameter {entry.get('name')!r}: {error}") from error
