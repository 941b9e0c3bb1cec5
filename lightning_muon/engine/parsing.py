"""From what a YAML file holds to objects, with errors that name the file, the key and the nearest right one.

Values take the forms that they have in a LightningCLI file, because jsonargparse converts them here, too.
"""

from __future__ import annotations

import importlib
import inspect
from argparse import ArgumentError
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lightning_muon.config import nearest, unknown_option
from lightning_muon.errors import UnknownOptionError

T = TypeVar("T")

_CLASS_KEYS = ("class_path", "init_args")
_PLAIN = (str, int, float, list, tuple, Mapping, type(None))
# Where a class_path without dots is looked up.
_PACKAGE = "lightning_muon"


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping that a YAML file holds.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no YAML, or holds something else; names the file.
    """
    import yaml  # Comes with jsonargparse and with accelerate.

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML file: {error}") from error
    if content is not None and not isinstance(content, dict):
        raise ValueError(f"{path} must hold `key: value` lines, got {content!r}")
    return content or {}


def build(kind: type[T], mapping: Mapping[str, Any], *, where: str) -> T:
    """``kind(**mapping)``, with values converted to the types of its parameters. Needs jsonargparse.

    Args:
        kind: A class with typed parameters.
        mapping: Name of a parameter -> value. A mapping with ``class_path`` is an object to build; what is neither
            text, number, sequence nor mapping is one that is built already.
        where: What an error names.

    Raises:
        UnknownOptionError: For a wrong key at any depth, with the nearest right one.
        ValueError: For what ``kind`` refuses.
    """
    if not isinstance(mapping, Mapping):
        raise ValueError(f"{where}: must be a mapping of options, got {mapping!r}")
    check_keys(mapping, list(inspect.signature(kind).parameters), where=where)
    built = {
        key: build_class(value, where=f"{where}: {key}") if _names_class(value) else value
        for key, value in mapping.items()
        if _names_class(value) or not isinstance(value, _PLAIN)
    }
    plain = {key: value for key, value in mapping.items() if key not in built}
    try:
        return kind(**_converted(kind, plain, skip=set(built)), **built)
    except (ArgumentError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def build_class(value: Mapping[str, Any], *, where: str) -> Any:
    """The object that ``{class_path: ..., init_args: {...}}`` describes; errors as those of :func:`build`."""
    kind = _import_class(value["class_path"], where)
    elsewhere = {"under init_args:": list(inspect.signature(kind).parameters)}
    check_keys(value, _CLASS_KEYS, where=where, elsewhere=elsewhere)
    return build(kind, value.get("init_args") or {}, where=where)


def check_keys(
    given: Collection[object],
    allowed: Sequence[str],
    *,
    where: str,
    elsewhere: Mapping[str, Collection[str]] | None = None,
) -> None:
    """Raise ``UnknownOptionError`` for the first of ``given`` that is not in ``allowed``.

    Args:
        given: Keys that the user wrote.
        allowed: Those that there are.
        where: What the error names.
        elsewhere: As in :func:`lightning_muon.config.unknown_option`.
    """
    for key in given:
        if key not in allowed:
            raise UnknownOptionError(f"{where}: {unknown_option(key, allowed, elsewhere)}")


def class_with_keys(mapping: Mapping[str, Any], kinds: Sequence[type[Any]], *, where: str) -> Mapping[str, Any]:
    """``mapping`` in the form ``{class_path: ..., init_args: ...}``, with the first of ``kinds`` that has all its keys.

    Raises:
        UnknownOptionError: If none has; names the first wrong key of the one that has most.
    """
    if "class_path" in mapping:
        return mapping
    parameters = {kind: list(inspect.signature(kind).parameters) for kind in kinds}
    best = max(kinds, key=lambda kind: sum(key in parameters[kind] for key in mapping))
    elsewhere = {f"to {kind.__name__}": parameters[kind] for kind in kinds if kind is not best}
    check_keys(mapping, parameters[best], where=f"{where} ({best.__name__})", elsewhere=elsewhere)
    return {"class_path": f"{best.__module__}.{best.__qualname__}", "init_args": dict(mapping)}


def _names_class(value: object) -> bool:
    return isinstance(value, Mapping) and "class_path" in value


def _import_class(path: object, where: str) -> type[Any]:
    module_name, _, name = str(path).rpartition(".")
    try:
        module = importlib.import_module(module_name or _PACKAGE)
    except ImportError as error:
        raise ValueError(f"{where}: class_path {path!r} cannot be imported: {error}") from error
    found = getattr(module, name, None)
    if not isinstance(found, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type) and not key.startswith("_")]
        meant = nearest(name, classes)
        raise ValueError(
            f"{where}: class_path {path!r} names no class" + (f"; did you mean {meant!r}?" if meant else "")
        )
    return found


def _converted(kind: type[Any], values: Mapping[str, Any], *, skip: set[str]) -> dict[str, Any]:
    """``values`` as the types of the parameters of ``kind`` ask, for example ``"1e-3"`` as a number."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, skip=set[str | int](skip), fail_untyped=False)
    parsed = parser.instantiate(parser.parse_object(dict(values)))
    return {key: parsed[key] for key in values}
