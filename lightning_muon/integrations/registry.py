"""Makes the strategy classes of Trainer and Fabric, and registers them with whichever package the program imports."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import Any

from wrapt import register_post_import_hook

from lightning_muon.compat.lightning import LightningPackage
from lightning_muon.flexdemo.config import FlexDeMoConfig

STRATEGY_NAME = "parallel_muon"
# Name -> (description, arguments of the strategy class).
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    STRATEGY_NAME: ("FSDP2 hybrid sharding, Muon for the matrices, AdamW for the rest", {}),
    "flexdemo": (
        "FSDP2 inside of nodes, which exchange components of their momenta: for slow links between them",
        {"optimizer": FlexDeMoConfig()},
    ),
}
# Packages with a Trainer, and those with a Fabric, in order of preference.
TRAINERS: dict[str, LightningPackage] = {
    name: LightningPackage(name) for name in ("lightning.pytorch", "pytorch_lightning")
}
FABRICS: dict[str, LightningPackage] = {
    "lightning.fabric": LightningPackage("lightning.pytorch"),
    "lightning_fabric": LightningPackage("pytorch_lightning"),
}


def register_strategies() -> None:
    """Register :data:`STRATEGIES` with all packages, now if they are imported already, else as soon as they are."""
    for package in TRAINERS:
        register_post_import_hook(partial(_register, "StrategyRegistry", trainer_strategy), package)
    for package in FABRICS:
        register_post_import_hook(partial(_register, "STRATEGY_REGISTRY", fabric_strategy), package)


def trainer_strategy(package: str | None = None) -> type[Any]:
    """The strategy class for the Trainer of a package, by default of the first one that is installed."""
    package = package or _first_installed(TRAINERS, "ParallelMuonStrategy needs Lightning")
    importlib.import_module(f"{package}.strategies")  # Which may be what registers, and so makes the class.
    return _make_trainer_strategy(package)


def fabric_strategy(package: str | None = None) -> type[Any]:
    """The strategy class for a package of Fabric, by default for the first one that is installed."""
    package = package or _first_installed(FABRICS, "ParallelMuonFabricStrategy needs Fabric")
    importlib.import_module(f"{package}.strategies")
    return _make_fabric_strategy(package)


@cache
def _make_trainer_strategy(package: str) -> type[Any]:
    from lightning_muon.integrations.lightning.strategy import TrainerStrategy

    is_first = package == next(iter(TRAINERS))
    module = "lightning_muon" if is_first else "lightning_muon.integrations.lightning.pytorch_lightning"
    body = {"__doc__": TrainerStrategy.__doc__, "__module__": module, "package": TRAINERS[package]}
    return type("ParallelMuonStrategy", (TrainerStrategy, _model_parallel_strategy(package)), body)


@cache
def _make_fabric_strategy(package: str) -> type[Any]:
    from lightning_muon.integrations.fabric.strategy import FabricStrategy

    body = {"__doc__": FabricStrategy.__doc__, "__module__": "lightning_muon", "package": FABRICS[package]}
    return type("ParallelMuonFabricStrategy", (FabricStrategy, _model_parallel_strategy(package)), body)


def _model_parallel_strategy(package: str) -> type[Any]:
    return importlib.import_module(f"{package}.strategies").ModelParallelStrategy


def _register(attribute: str, strategy_class: Callable[[str], type[Any]], package: ModuleType) -> None:
    registry = getattr(importlib.import_module(f"{package.__name__}.strategies"), attribute)
    for name, (description, arguments) in STRATEGIES.items():
        if name not in registry:
            registry.register(name, strategy_class(package.__name__), description=description, **arguments)


def _first_installed(packages: dict[str, LightningPackage], problem: str) -> str:
    for package in packages:
        if _is_installed(package):
            return package
    raise ImportError(f"{problem}: none of {', '.join(packages)} is installed; pip install 'lightning-muon[lightning]'")


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # The parent package is missing.
        return False
