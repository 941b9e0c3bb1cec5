"""Model, options and mesh of a YAML file of ``lightning-muon fit``, without training and without weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_muon.cli.plan_flexdemo_options import STRATEGY_NAME, config_from_yaml, muon_part
from lightning_muon.config import MuonConfig
from lightning_muon.engine.mesh_sizes import MeshSizes
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.params.routing import Route, route_module
from lightning_muon.schedule.shapes import ModelShapes, ParameterShape


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """What a YAML file says of a training.

    Attributes:
        shapes: The parameters, routed as the optimizer will route them.
        optimizer: Options of the strategy, or the defaults; those that FlexDeMo shares with ParallelMuon.
        replicate: Replicas that the file asks for, if it does.
        shard: Ranks per replica that the file asks for, if it does.
        flexdemo: Options of the strategy's FlexDeMo, if that is its optimizer.
    """

    shapes: ModelShapes
    optimizer: MuonConfig
    replicate: int | None
    shard: int | None
    flexdemo: FlexDeMoConfig | None = None


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
    trainer = cli.config["fit"].get("trainer") or {}
    options = _init_args(trainer.get("strategy"))
    flexdemo = _flexdemo_config(trainer.get("strategy"), options.get("optimizer"))
    optimizer = _muon_config(options.get("optimizer")) if flexdemo is None else muon_part(flexdemo)
    replicate, shard = _mesh_sizes(options, trainer)
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
        _parameter_shape(route, tuple(parameter.shape), frozen=not parameter.requires_grad)
        for route, parameter in zip(routes.values(), module.parameters(), strict=True)
    )
    return ModelShapes(name=name, source=source, parameters=parameters)


def _parameter_shape(route: Route, shape: tuple[int, ...], *, frozen: bool) -> ParameterShape:
    return ParameterShape(
        name=route.name,
        shape=shape,
        kind=route.kind,
        reason=route.reason,
        splits=route.splits,
        split_dim=route.split_dim,
        frozen=frozen,
    )


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


def _init_args(strategy: Any) -> Mapping[str, Any]:
    found = strategy.get("init_args") if hasattr(strategy, "get") else None
    return found if found is not None else {}


def _flexdemo_config(strategy: Any, optimizer: Any) -> FlexDeMoConfig | None:
    """The config of FlexDeMo, by the name of the strategy or by its ``optimizer``."""
    return FlexDeMoConfig() if strategy == STRATEGY_NAME else config_from_yaml(optimizer)


def _muon_config(optimizer: Any) -> MuonConfig:
    """The config of the strategy's ``optimizer``; the default for ``"auto"`` and ``"keep"``."""
    if isinstance(optimizer, MuonConfig):
        return optimizer
    if optimizer is None or isinstance(optimizer, str):
        return MuonConfig()
    values = {field.name: optimizer.get(field.name, getattr(MuonConfig(), field.name)) for field in fields(MuonConfig)}
    values["fused"] = dict(values["fused"] or {})
    return MuonConfig(**values)


def _mesh_sizes(options: Mapping[str, Any], trainer: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Sizes of the mesh, as far as the file determines them without looking at a machine."""
    asked = MeshSizes(**{field.name: options.get(field.name, field.default) for field in fields(MeshSizes)})
    devices, nodes = trainer.get("devices"), trainer.get("num_nodes")
    if isinstance(devices, int) and isinstance(nodes, int) and devices > 0:
        return asked.resolve(num_nodes=nodes, num_processes=devices)
    replicate, shard = (size if isinstance(size, int) else None for size in (asked.replicate_size, asked.shard_size))
    return replicate, shard
