"""What is planned: a shape file or the model of a YAML file of ``lightning-muon fit``, its options and its mesh."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from lightning_muon.config import MuonConfig, nearest
from lightning_muon.engine.mesh_sizes import MeshSizes
from lightning_muon.engine.options import Options
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.replicators import DCTTopK, DiLoCo, Full, NoReplication, Random, Slicing, Striding
from lightning_muon.params.routing import route_module
from lightning_muon.schedule.shapes import ModelShapes, ParameterShape

_FLEXDEMO = "flexdemo"  # Name of the strategy.
_REPLICATORS: tuple[type[Any], ...] = (DCTTopK, Random, Striding, Slicing, Full, NoReplication, DiLoCo)
# What the words may say beside the options of the replicator: all else changes neither bytes nor times.
_KEYS = ("base", "value_format", "dense_below", "delay", "overlap", "chunk_bytes")


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Replicas of so many shards each."""

    replicate: int  # Number of replicas.
    shard: int  # Ranks that share one replica.

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.replicate * self.shard


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """What a YAML file says of a training."""

    shapes: ModelShapes  # The parameters, routed as the optimizer will route them.
    optimizer: MuonConfig  # Options of the strategy, or the defaults; those that FlexDeMo shares with ParallelMuon.
    replicate: int | None  # Replicas that the file asks for, if it does.
    shard: int | None  # Ranks per replica that the file asks for, if it does.
    flexdemo: FlexDeMoConfig | None = None  # Options of the strategy's FlexDeMo, if that is its optimizer.


def read_config(path: Path, cli_class: type[Any]) -> PlannedModel:
    """Read a YAML file and build its model on the meta device, without a Trainer.

    A model that needs real tensors in its constructor is built on the CPU.

    Args:
        path: What ``lightning-muon fit --config`` takes.
        cli_class: ``LightningCLI`` of the installed package.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If LightningCLI refuses it; names the file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no config file {path}")
    try:
        cli = _model_only(cli_class)(args=["fit", "--config", str(path)], save_config_callback=None)
    except SystemExit as error:
        # The parser has printed its usage and ends the process; what it says does not name the file.
        raise ValueError(f"{path}: {error.__context__ or 'LightningCLI does not accept it, see above'}") from error
    trainer = cli.config["fit"].as_dict().get("trainer") or {}
    options = _options(trainer.get("strategy"), source=str(path))
    config = options.config
    flexdemo = config if isinstance(config, FlexDeMoConfig) else None
    optimizer = config if isinstance(config, MuonConfig) else muon_part(config)
    replicate, shard = _mesh_sizes(options.mesh_sizes, trainer)
    shapes = shapes_of(cli.model, optimizer, name=f"{type(cli.model).__name__} ({path.name})", source=str(path))
    return PlannedModel(shapes=shapes, optimizer=optimizer, replicate=replicate, shard=shard, flexdemo=flexdemo)


def shapes_of(module: nn.Module, optimizer: MuonConfig, *, name: str, source: str) -> ModelShapes:
    """Shapes and routes of a module's parameters, in their order."""
    routes = route_module(
        module,
        adamw_patterns=optimizer.adamw_patterns,
        muon_patterns=optimizer.muon_patterns,
        fused=optimizer.fused,
    )
    parameters = tuple(
        ParameterShape(
            name=route.name,
            shape=tuple(parameter.shape),
            kind=route.kind,
            reason=route.reason,
            splits=route.splits,
            split_dim=route.split_dim,
            frozen=not parameter.requires_grad,
        )
        for route, parameter in zip(routes.values(), module.parameters(), strict=True)
    )
    return ModelShapes(name=name, source=source, parameters=parameters)


def _model_only(cli_class: type[Any]) -> type[Any]:
    """A LightningCLI that parses everything, makes the model and nothing else."""

    class ModelOnlyCLI(cli_class):
        def parse_arguments(self, parser: Any, args: Any) -> None:
            with warnings.catch_warnings():
                # It suspects a mistake when a program with arguments of its own calls LightningCLI with others.
                warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended to run")
                super().parse_arguments(parser, args)

        def _set_seed(self) -> None:
            """No random numbers are needed."""

        def instantiate_classes(self) -> None:
            parser = self._parser("fit")
            only_model = type(self.config)(model=self.config["fit"]["model"])
            self.model = _on_meta_device(lambda: _configured(parser.instantiate_classes(only_model)["model"]))

        def _run_subcommand(self, subcommand: str) -> None:
            """Nothing is trained."""

    return ModelOnlyCLI


def _configured(model: Any) -> nn.Module:
    """The model with the layers that ``configure_model`` makes."""
    model.configure_model()
    return model


def _on_meta_device(build: Callable[[], nn.Module]) -> nn.Module:
    try:
        with torch.device("meta"):
            return build()
    except Exception:
        # Whatever a constructor does with numbers fails on tensors that have none.
        return build()


def _options(strategy: Any, *, source: str) -> Options:
    """The optimizer and the sizes of the mesh that a strategy of a YAML file asks for."""
    if strategy == _FLEXDEMO:
        return Options(optimizer=FlexDeMoConfig())
    arguments = (strategy.get("init_args") or {}) if isinstance(strategy, Mapping) else {}
    known = ("optimizer", *(field.name for field in fields(MeshSizes)))
    given = {key: arguments[key] for key in known if arguments.get(key) is not None}
    return Options.from_mapping(given, source=source)


def _mesh_sizes(asked: MeshSizes, trainer: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Sizes of the mesh, as far as the file determines them without looking at a machine."""
    devices, nodes = trainer.get("devices"), trainer.get("num_nodes")
    if isinstance(devices, int) and isinstance(nodes, int) and devices > 0:
        return asked.resolve(num_nodes=nodes, num_processes=devices)
    replicate, shard = (size if isinstance(size, int) else None for size in (asked.replicate_size, asked.shard_size))
    return replicate, shard


def with_fused(model: ModelShapes, fused: Mapping[str, Sequence[int]]) -> ModelShapes:
    """Divide the weights whose names match a pattern into logical matrices.

    Args:
        model: Shapes.
        fused: Shell pattern -> sizes of the parts along dimension 0, or one number: so many equal parts.

    Raises:
        ValueError: If a pattern matches no matrix, or its parts do not make up the weight.
    """
    parameters = list(model.parameters)
    for pattern, parts in fused.items():
        matched = [
            i for i, p in enumerate(parameters) if p.kind == "matrix" and fnmatchcase(p.name, pattern) and not p.frozen
        ]
        if not matched:
            raise ValueError(f"fused pattern {pattern!r} matches no matrix of {model.name}")
        for i in matched:
            sizes = _part_sizes(parameters[i], parts)
            reason = f"{parameters[i].reason}, {len(sizes)} fused"
            parameters[i] = replace(parameters[i], splits=sizes, split_dim=0, reason=reason)
    return replace(model, parameters=tuple(parameters))


def with_stacks_cut_along(model: ModelShapes, dim: int) -> ModelShapes:
    """Shard stacks along another dimension than the one that counts matrices.

    Raises:
        ValueError: If there are no stacks, or they have no such dimension.
    """
    if not any(parameter.kind == "stack" for parameter in model.parameters):
        raise ValueError(f"{model.name} has no stacks of matrices that could be cut along dimension {dim}")
    return replace(
        model, parameters=tuple(replace(p, shard_dim=dim) if p.kind == "stack" else p for p in model.parameters)
    )


def _part_sizes(parameter: ParameterShape, parts: Sequence[int]) -> tuple[int, ...]:
    size = parameter.shape[0]
    if len(parts) > 1:
        return tuple(parts)
    (number,) = parts
    if number < 1 or size % number:
        raise ValueError(f"{parameter.name} {parameter.shape} cannot be divided into {number} equal parts")
    return (size // number,) * number


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
    kind: type[Any] = type(base.replicator) if named is None else _named(str(named))
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
        replicator = kind(**options) if named is not None else replace(cast(Any, base.replicator), **options)
    except TypeError as error:
        raise ValueError(f"--flexdemo replicator={kind.__name__}: {error}; its options are {', '.join(own)}") from error
    return replace(base, replicator=replicator, **values)


def muon_part(config: FlexDeMoConfig) -> MuonConfig:
    """The options that FlexDeMo and ParallelMuon share: patterns, fused weights, Newton-Schulz."""
    shared = {field.name for field in fields(MuonConfig)} & {field.name for field in fields(FlexDeMoConfig)}
    # FlexDeMo's is of the buckets that travel between nodes.
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


def _nearest(wrong: str, right: Sequence[str]) -> str:
    found = nearest(wrong, right)
    return "" if found is None else f" (did you mean {found!r}?)"
