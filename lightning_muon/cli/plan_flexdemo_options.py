"""The options of FlexDeMo as ``lightning-muon plan`` gets them: words of the command line, or a parsed YAML file."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from lightning_muon.config import MuonConfig, nearest
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.replicators import DCTTopK, DiLoCo, Full, NoReplication, Random, Slicing, Striding

STRATEGY_NAME = "flexdemo"
_REPLICATORS: tuple[type[Any], ...] = (DCTTopK, Random, Striding, Slicing, Full, NoReplication, DiLoCo)
# What the words may say beside the options of the replicator: all else changes neither bytes nor times.
_KEYS = ("base", "value_format", "dense_below", "delay", "overlap", "chunk_bytes")


def config_from_words(words: Sequence[str], base: FlexDeMoConfig) -> FlexDeMoConfig:
    """``base`` with other values.

    Args:
        words: ``key=value``: fields of the config, ``replicator=NAME``, and fields of the replicator.
        base: What the words leave out.

    Raises:
        ValueError: If a word has another form, or a key or a name that there is not; names the nearest right one.
    """
    values = dict(_split(word) for word in words)
    named = values.pop("replicator", None)
    kind = type(base.replicator) if named is None else _named(str(named))
    own = [field.name for field in fields(kind)]
    known = ("replicator", *_KEYS, *own)
    for key in values:
        if key not in known:
            raise ValueError(
                f"--flexdemo has no key {key!r}{_nearest(key, known)}; with {kind.__name__} there are "
                f"{', '.join(known)}"
            )
    options = {key: values.pop(key) for key in own if key in values}
    try:
        replicator = kind(**options) if named is not None else replace(base.replicator, **options)
    except TypeError as error:
        raise ValueError(f"--flexdemo replicator={kind.__name__}: {error}; its options are {', '.join(own)}") from error
    return replace(base, replicator=replicator, **values)


def config_from_yaml(optimizer: Any) -> FlexDeMoConfig | None:
    """The config that a parsed ``optimizer`` of the strategy stands for; ``None`` if it is another optimizer's.

    Args:
        optimizer: A config, or what jsonargparse makes of one: the fields, or ``class_path`` and ``init_args``.
    """
    if isinstance(optimizer, FlexDeMoConfig):
        return optimizer
    # Only FlexDeMo has a replicator.
    values = _as_dict(optimizer)
    values = _as_dict(values.get("init_args")) if values.get("class_path", "").endswith("FlexDeMoConfig") else values
    if "replicator" not in values:
        is_named = _as_dict(optimizer).get("class_path", "").endswith("FlexDeMoConfig")
        return FlexDeMoConfig(**values) if is_named else None
    return FlexDeMoConfig(**{key: _made(value) for key, value in values.items()})


def muon_part(config: FlexDeMoConfig) -> MuonConfig:
    """The options that FlexDeMo and ParallelMuon share: patterns, fused weights, Newton-Schulz."""
    shared = {field.name for field in fields(MuonConfig)} & {field.name for field in fields(FlexDeMoConfig)}
    # The chunks of FlexDeMo are those between nodes.
    taken = {name: getattr(config, name) for name in shared - {"chunk_bytes"}}
    return MuonConfig(**taken, dedupe="never")


def _split(word: str) -> tuple[str, Any]:
    key, equals, text = word.partition("=")
    if not (key and equals and text):
        raise ValueError(f"--flexdemo takes KEY=VALUE, such as top_k=8, got {word!r}")
    try:
        return key, ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return key, text


def _named(name: str) -> type[Any]:
    """The replicator of that class name."""
    known = {kind.__name__: kind for kind in _REPLICATORS}
    if name not in known:
        raise ValueError(
            f"--flexdemo knows no replicator {name!r}{_nearest(name, list(known))}; there are {', '.join(known)}"
        )
    return known[name]


def _made(value: Any) -> Any:
    """``value``, or the instance that its ``class_path`` and ``init_args`` describe."""
    described = _as_dict(value)
    if "class_path" not in described:
        return value
    module, _, name = described["class_path"].rpartition(".")
    arguments = _as_dict(described.get("init_args"))
    return getattr(importlib.import_module(module), name)(**{key: _made(each) for key, each in arguments.items()})


def _as_dict(value: Any) -> dict[str, Any]:
    """Entries of a mapping or of a namespace of jsonargparse; nothing for all else."""
    if isinstance(value, Mapping):
        return dict(value)
    return dict(vars(value)) if hasattr(value, "__dict__") and hasattr(value, "get") else {}


def _nearest(wrong: str, right: Sequence[str]) -> str:
    found = nearest(wrong, right)
    return "" if found is None else f" (did you mean {found!r}?)"
