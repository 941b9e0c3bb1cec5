"""Registers the strategies in whichever package of Fabric the program imports, and when it does."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from types import ModuleType
from typing import Any

from wrapt import register_post_import_hook

from lightning_muon.compat.lightning import LightningPackage
from lightning_muon.integrations.lightning.registry import STRATEGIES

# Package of Fabric -> that of the Trainer beside it, in order of preference.
PACKAGES: dict[str, LightningPackage] = {
    "lightning.fabric": LightningPackage("lightning.pytorch"),
    "lightning_fabric": LightningPackage("pytorch_lightning"),
}


def register_fabric_strategies() -> None:
    """Register both strategies with both packages, now if imported already, else as soon as they are."""
    for package in PACKAGES:
        register_post_import_hook(_register, package)


def default_strategy_class() -> type[Any]:
    """The strategy class of the first package of Fabric that is installed."""
    for package in PACKAGES:
        if _is_installed(package):
            return strategy_class(package)
    raise ImportError(
        f"ParallelMuonFabricStrategy needs Fabric: none of {', '.join(PACKAGES)} is installed; "
        "pip install 'lightning-muon[lightning]'"
    )


def strategy_class(package: str) -> type[Any]:
    """The strategy class for one package of Fabric, which is imported."""
    importlib.import_module(f"{package}.strategies")  # Which may be what registers, and so makes the class.
    return _make_class(package)


@cache
def _make_class(package: str) -> type[Any]:
    from lightning_muon.integrations.fabric.strategy import ParallelMuonFabric

    base = importlib.import_module(f"{package}.strategies").ModelParallelStrategy
    body = {"__doc__": ParallelMuonFabric.__doc__, "__module__": __name__, "package": PACKAGES[package]}
    return type("ParallelMuonFabricStrategy", (ParallelMuonFabric, base), body)


def _register(package: ModuleType) -> None:
    registry = importlib.import_module(f"{package.__name__}.strategies").STRATEGY_REGISTRY
    for name, (description, arguments) in STRATEGIES.items():
        if name not in registry:
            registry.register(name, strategy_class(package.__name__), description=description, **arguments)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # The parent package is missing.
        return False
