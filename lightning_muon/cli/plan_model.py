"""Input of a plan: a shape file, or the model, options and mesh of a YAML file of ``lightning-muon fit``."""

from __future__ import annotations

import importlib
import inspect
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
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
from lightning_muon.integrations.registry import TRAINERS, first_installed
from lightning_muon.params.routing import route_module
from lightning_muon.schedule.shapes import ModelShapes, ParameterShape, read_shapes, shipped_shapes

_SECTIONS = ("model", "data", "trainer", "optimizer", "lr_scheduler", "seed_everything", "ckpt_path")


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

    def mesh(self, arguments: Namespace) -> Mesh:
        """The mesh by the sizes of the command line, or else of the file."""
        shard = arguments.shard_size or self.shard
        if shard is None:
            raise ValueError(
                f"{arguments.config or arguments.shapes} does not say how many ranks there are; add --shard-size (and "
                "--replicate-size)"
            )
        return Mesh(arguments.replicate_size or self.replicate or 1, shard)


def add_model_arguments(parser: ArgumentParser) -> None:
    """Declare the options that choose the model and the number of ranks."""
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--config", metavar="FILE.yaml", type=Path, help="a file for lightning-muon fit")
    model.add_argument("--shapes", metavar="FILE.json", help=f"a shape file, or one of: {', '.join(shipped_shapes())}")
    add = parser.add_argument
    add("--replicate-size", metavar="R", type=count, help="number of replicas (default: the config's, or 1)")
    add("--shard-size", metavar="S", type=count, help="ranks of a replica (default: the config's; 8 for shapes)")


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
