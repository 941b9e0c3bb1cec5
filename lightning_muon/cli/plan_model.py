"""Input of a plan: a shape file, or the model, options and mesh of a YAML file of ``lightning-muon fit``."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_muon.config import MuonConfig, nearest
from lightning_muon.engine.mesh_sizes import MeshSizes
from lightning_muon.engine.options import Options, check_keys, read_yaml
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.integrations.registry import TRAINERS, first_installed
from lightning_muon.params.routing import route_module
from lightning_muon.params.shapes import ModelShapes, ParameterShape

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
    # Config of the strategy, or of what the ranks of a node do together with its FlexDeMo.
    optimizer: MuonConfig = field(default_factory=MuonConfig)
    replicate: int | None = None  # Number of replicas in the file, if it says so.
    shard: int | None = None  # Number of shards in the file, if it says so.
    flexdemo: FlexDeMoConfig | None = None  # Options of the strategy's FlexDeMo, if that is its optimizer.
    machine: str = "reference"  # Machine whose rates are the default.
    module: nn.Module | None = None  # Model of the file; its parameters are those of `shapes`, in the same order.
    precision: str | None = None  # Precision of the file's Trainer.


def read_config(path: Path) -> PlannedModel:
    """Read what ``lightning-muon fit --config`` takes and build its model on the meta device, without a Trainer.

    A model that needs real tensors in its constructor is built on the CPU. Needs Lightning and jsonargparse.
    """
    from jsonargparse import ArgumentError, ArgumentParser

    content, trainer = _read_fit_file(path)
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
    optimizer = config.inside_nodes if isinstance(config, FlexDeMoConfig) else config
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


def _read_fit_file(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The content of the file, and its section ``trainer``; raises for misspelled sections and options of the Trainer.

    Keys that resemble none are left to LightningCLI, which has further ones.
    """
    if not path.is_file():
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
