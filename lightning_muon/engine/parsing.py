"""Builds objects from the content of a YAML file; errors name the file, the key and the nearest right one."""

from __future__ import annotations

import importlib
import inspect
import sys
from argparse import ArgumentError
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from lightning_muon.config import unknown_option
from lightning_muon.errors import UnknownOptionError
from lightning_muon.removed import removed_value

T = TypeVar("T")

# Values of any other type are taken as they are; a mapping with `class_path` is built.
_PLAIN = (str, int, float, list, tuple, Mapping, type(None))
# Where a class_path without dots is looked up.
_PACKAGE = "lightning_muon"


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping that a YAML file holds, or a ``ValueError`` that names the file."""
    import yaml  # Comes with jsonargparse and with accelerate.

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML file: {error}") from error
    if content is not None and not isinstance(content, dict):
        raise ValueError(f"{path} must hold `key: value` lines, got {content!r}")
    return content or {}


def build(kind: type[T], mapping: Mapping[str, Any], *, where: str) -> T:
    """``kind(**mapping)``, with values converted to its types by jsonargparse; errors name ``where``."""
    from jsonargparse import ArgumentParser

    if not isinstance(mapping, Mapping):
        raise ValueError(f"{where}: must be a mapping of options, got {mapping!r}")
    parameters = list(inspect.signature(kind).parameters)
    check_keys(mapping, parameters, where=where, of=kind.__name__)
    plain, built = dict[str, Any](), dict[str, Any]()
    for key, value in mapping.items():
        if isinstance(value, Mapping) and "class_path" in value:
            declared = get_type_hints(kind.__init__).get(key)
            built[key] = build_class(value, _classes_in(declared), where=f"{where}: {key}")
        else:
            (plain if isinstance(value, _PLAIN) else built)[key] = value
    parser = ArgumentParser(exit_on_error=False)
    try:
        # Every type that jsonargparse looks at takes it milliseconds.
        parser.add_class_arguments(kind, skip=set[str | int](parameters) - plain.keys(), fail_untyped=False)
        parsed = parser.instantiate(parser.parse_object(plain))
    except (ArgumentError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: {removed_value(str(error)) or error}") from error
    for key, value in plain.items():
        of = parsed[key].__module__ if isinstance(value, str) and inspect.isroutine(parsed[key]) else None
        if (of or "").partition(".")[0] in sys.stdlib_module_names:
            raise ValueError(f"{where}: {key}: {value!r} is a function of Python itself; name one that is made for it")
    try:
        return kind(**{key: parsed[key] for key in plain}, **built)
    except ValueError as error:  # No TypeError, which may be a bug: whoever reads it needs the traceback.
        raise ValueError(f"{where}: {error}") from error


def build_class(value: Mapping[str, Any], kinds: Sequence[type[Any]], *, where: str) -> Any:
    """Build what ``{class_path, init_args}`` describes, one of ``kinds``; for arguments alone, that with most of them.

    The module of a ``class_path`` is imported, and no class of another kind is called.
    """
    if "class_path" in value:
        kind = _import_class(value["class_path"], where)
        if not issubclass(kind, tuple(kinds)):
            wanted = " or ".join(each.__name__ for each in kinds) or "class that this option takes"
            raise ValueError(f"{where}: class_path {value['class_path']!r} names no {wanted}")
        check_keys(value, ("class_path", "init_args"), where=where)
        return build(kind, value.get("init_args") or {}, where=where)
    parameters = {kind: list(inspect.signature(kind).parameters) for kind in kinds}
    best = max(kinds, key=lambda kind: sum(key in parameters[kind] for key in value))
    check_keys(value, parameters[best], where=f"{where} ({best.__name__})", of=best.__name__)
    return build(best, value, where=where)


def _classes_in(annotation: Any) -> list[type[Any]]:
    """The classes of this package in a declared type, maybe a union: of ``Callable``, nearly every class is one."""
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return [each for each in members if isinstance(each, type) and each.__module__.startswith(f"{_PACKAGE}.")]


def check_keys(given: Collection[object], allowed: Sequence[str], *, where: str, of: str = "") -> None:
    """Raise ``UnknownOptionError`` for a key that the class ``of`` does not take."""
    for key in given:
        if key not in allowed:
            raise UnknownOptionError(f"{where}: {unknown_option(key, allowed, of=of)}")


def _import_class(path: object, where: str) -> type[Any]:
    module_name, _, name = str(path).rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name or _PACKAGE), name, None)
    except ImportError as error:
        raise ValueError(f"{where}: class_path {path!r} cannot be imported: {error}") from error
    if not isinstance(found, type):
        raise ValueError(f"{where}: class_path {path!r} names no class")
    return found
