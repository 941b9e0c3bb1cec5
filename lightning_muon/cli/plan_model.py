"""Input of a plan: a shape file, or the model, options and mesh of a YAML file of ``lightning-muon fit``."""

from __future__ import annotations

import ast
import importlib
import inspect
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_muon.cli.table import count
from lightning_muon.config import MuonConfig, from_arguments, nearest
from lightning_muon.engine.mesh_sizes import MeshSizes
from lightning_muon.engine.options import Options
from lightning_muon.engine.parsing import check_keys, read_yaml
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.replicators import DCTTopK, DiLoCo, Full, NoReplication, Random, Slicing, Striding
from lightning_muon.integrations.registry import TRAINERS, first_installed
from lightning_muon.params.routing import route_module
from lightning_muon.schedule.shapes import ModelShapes, ParameterShape, read_shapes, shipped_shapes

_REPLICATORS: tuple[type[Any], ...] = (DCTTopK, Random, Striding, Slicing, Full, NoReplication, DiLoCo)
_SECTIONS = ("model", "data", "trainer", "optimizer", "lr_scheduler", "seed_everything", "ckpt_path")
# Keys that the words may set beside the options of the replicator: others change neither bytes nor times.
_KEYS = ("base", "value_format", "dense_below", "delay", "overlap", "chunk_bytes")


class Mesh(NamedTuple):
    """Replicas of so many shards each."""

    replicate: int
    shard: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.replicate * self.shard


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A training, from a YAML file or a shape file."""

    shapes: ModelShapes  # The parameters, routed as the optimizer will route them.
    # Config of the strategy, or the options that FlexDeMo shares with ParallelMuon.
    optimizer: MuonConfig = field(default_factory=MuonConfig)
    replicate: int | None = None  # Number of replicas in the file, if it says so.
    shard: int | None = None  # Number of shards in the file, if it says so.
    flexdemo: FlexDeMoConfig | None = None  # Options of the strategy's FlexDeMo, if that is its optimizer.
    machine: str = "reference"  # Machine whose rates are the default.
    module: nn.Module | None = None  # Model of the file; its parameters are those of `shapes`, in the same order.
    precision: str | None = None  # Precision of the file's Trainer.

    def mesh(self, arguments: Namespace, *, fewest_replicas: int = 1) -> Mesh:
        """The mesh by the sizes of the command line, or else of the file."""
        shard = arguments.shard_size or self.shard
        if shard is None:
            raise ValueError(
                f"{arguments.config or arguments.shapes} does not say how many ranks there are; add --shard-size (and "
                "--replicate-size)"
            )
        return Mesh(arguments.replicate_size or self.replicate or fewest_replicas, shard)


def add_model_arguments(parser: ArgumentParser) -> Any:
    """Declare the options that choose the model and the number of ranks; argparse takes ``--shard`` for short, too.

    Returns the group of options of which one is required.
    """
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--config", metavar="FILE.yaml", type=Path, help="what lightning-muon fit takes")
    model.add_argument("--shapes", metavar="FILE.json", help=f"a shape file, or one of: {', '.join(shipped_shapes())}")
    parser.add_argument(
        "--replicate-size",
        "--replicate",
        metavar="R",
        type=count,
        help="replicas (the config's, or 1; with FlexDeMo 2)",
    )
    parser.add_argument(
        "--shard-size", "--shard", metavar="S", type=count, help="ranks per replica (the config's; of shapes, plan: 8)"
    )
    return model


def read_model(arguments: Namespace) -> PlannedModel:
    """The model of ``--config`` or ``--shapes``."""
    if arguments.config is not None:
        return read_config(arguments.config)
    return PlannedModel(shapes=read_shapes(arguments.shapes))


def read_fit_file(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a file of ``lightning-muon fit``; return its content and its section ``trainer``.

    A misspelled section or option of the Trainer is an ``UnknownOptionError``; keys that resemble none are left to
    LightningCLI, which has further ones. Needs Lightning.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}; --config takes one for `lightning-muon fit`")
    content = read_yaml(path)
    trainer = content.get("trainer")
    trainer = trainer if isinstance(trainer, dict) else {}
    package = importlib.import_module(first_installed(TRAINERS, "--config needs Lightning"))
    options = list(inspect.signature(package.Trainer).parameters)
    for where, keys, known in ((str(path), content, _SECTIONS), (f"{path}: trainer", trainer, options)):
        names = [str(key).partition(".")[0].rstrip("+") for key in keys]  # `trainer.max_steps`, `callbacks+`.
        check_keys([name for name in names if nearest(name, known)], known, where=where)
    return content, trainer


def read_config(path: Path) -> PlannedModel:
    """Read what ``lightning-muon fit --config`` takes and build its model on the meta device, without a Trainer.

    A model that needs real tensors in its constructor is built on the CPU. Needs Lightning and jsonargparse.
    """
    from jsonargparse import ArgumentError, ArgumentParser

    content, trainer = read_fit_file(path)
    # As LightningCLI does it.
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(nn.Module, "model", fail_untyped=False, required=True)
    try:
        parsed = parser.parse_object({"model": content.get("model")})
    except ArgumentError as error:
        raise ValueError(f"{path}: {error}") from error
    try:
        with torch.device("meta"):
            model = parser.instantiate(parsed)["model"]
            model.configure_model()
    except Exception:
        # A constructor that reads values fails on the meta device.
        model = parser.instantiate(parsed)["model"]
        model.configure_model()
    strategy = trainer.get("strategy")
    arguments = (strategy.get("init_args") or {}) if isinstance(strategy, Mapping) else {}
    known = ("optimizer", *(each.name for each in fields(MeshSizes)))
    given = {key: arguments[key] for key in known if arguments.get(key) is not None}
    options = Options.from_mapping(given, source=str(path))
    config = FlexDeMoConfig() if strategy == "flexdemo" else options.config
    flexdemo = config if isinstance(config, FlexDeMoConfig) else None
    # The options that FlexDeMo shares with ParallelMuon, without its `chunk_bytes` of the buckets between nodes.
    shared = vars(config) if flexdemo is None else {**vars(config), "chunk_bytes": MuonConfig.chunk_bytes}
    optimizer = from_arguments(MuonConfig, shared)
    # The mesh as far as the file determines it without the machine.
    devices, nodes = trainer.get("devices"), trainer.get("num_nodes", 1)
    found: Sequence[int | str] = (options.replicate_size, options.shard_size)
    if isinstance(devices, int) and isinstance(nodes, int) and devices > 0:
        found = options.resolve(num_nodes=nodes, num_processes=devices)
    replicate, shard = (size if isinstance(size, int) else None for size in found)
    parameters = tuple(
        ParameterShape(**asdict(route), shape=tuple(parameter.shape), frozen=not parameter.requires_grad)
        for route, parameter in zip(route_module(model, optimizer).values(), model.parameters(), strict=True)
    )
    shapes = ModelShapes(name=f"{type(model).__name__} ({path.name})", source=str(path), parameters=parameters)
    return PlannedModel(
        shapes=shapes,
        optimizer=optimizer,
        replicate=replicate,
        shard=shard,
        flexdemo=flexdemo,
        machine="cpu" if trainer.get("accelerator") == "cpu" else "reference",
        module=model,
        precision=str(trainer.get("precision", "32-true")),
    )


def with_fused(model: ModelShapes, fused: Mapping[str, Sequence[int]]) -> ModelShapes:
    """Divide the weights whose names match a shell pattern into parts of these sizes, or into so many equal parts."""
    parameters = list(model.parameters)
    for pattern, parts in fused.items():
        matched = [
            i for i, p in enumerate(parameters) if p.kind == "matrix" and fnmatchcase(p.name, pattern) and not p.frozen
        ]
        if not matched:
            raise ValueError(f"fused pattern {pattern!r} matches no matrix of {model.name}")
        for i in matched:
            weight = parameters[i]
            sizes = tuple(parts) if len(parts) > 1 else (weight.shape[0] // parts[0],) * parts[0]
            reason = f"{weight.reason}, {len(sizes)} fused"
            parameters[i] = replace(weight, splits=sizes, split_dim=0, reason=reason)
    return replace(model, parameters=tuple(parameters))


def with_stacks_cut_along(model: ModelShapes, dim: int) -> ModelShapes:
    """Shard stacks along dimension ``dim`` instead of the one that counts matrices."""
    if not any(parameter.kind == "stack" for parameter in model.parameters):
        raise ValueError(f"{model.name} has no stacks of matrices that could be cut along dimension {dim}")
    return replace(
        model, parameters=tuple(replace(p, shard_dim=dim) if p.kind == "stack" else p for p in model.parameters)
    )


def config_from_words(words: Sequence[str], base: FlexDeMoConfig) -> FlexDeMoConfig:
    """``base`` with other values: ``key=value`` of its fields, ``replicator=NAME``, and fields of the replicator."""
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not (key and equals and text):
            raise ValueError(f"--flexdemo takes KEY=VALUE, such as top_k=8, got {word!r}")
        try:
            values[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            values[key] = text
    kind: Any = type(base.replicator)
    if "replicator" in values:
        known = {each.__name__: each for each in _REPLICATORS}
        check_keys([values["replicator"]], list(known), where="--flexdemo replicator")
        kind = known[values.pop("replicator")]
    own = [each.name for each in fields(kind)]
    check_keys(values, ("replicator", *_KEYS, *own), where="--flexdemo")
    options = {key: values.pop(key) for key in own if key in values}
    kept = vars(base.replicator) if kind is type(base.replicator) else {}
    return replace(base, replicator=kind(**{**kept, **options}), **values)
