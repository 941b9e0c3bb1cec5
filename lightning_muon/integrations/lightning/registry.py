"""Registers the strategies in whichever Lightning package the program imports, and when it does."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any

from wrapt import register_post_import_hook

from lightning_muon.flexdemo.config import FlexDeMoConfig

STRATEGY_NAME = "parallel_muon"
# Package -> the module of ours that defines its strategy class, in order of preference.
_STRATEGY_MODULES = {
    "lightning.pytorch": "lightning_muon.integrations.lightning.lightning_pytorch",
    "pytorch_lightning": "lightning_muon.integrations.lightning.pytorch_lightning",
}
# Name -> (description, arguments of the strategy class).
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    STRATEGY_NAME: ("FSDP2 hybrid sharding, Muon for the matrices, AdamW for the rest", {}),
    "flexdemo": (
        "FSDP2 inside of nodes, which exchange components of their momenta: for slow links between them",
        {"optimizer": FlexDeMoConfig()},
    ),
}


def register_strategies() -> None:
    """Register :data:`STRATEGIES` with both packages, now if imported already, else as soon as they are."""
    for package in _STRATEGY_MODULES:
        register_post_import_hook(_register, package)


def default_strategy_class() -> type[Any]:
    """The strategy class of the first Lightning package that is installed."""
    for package, module in _STRATEGY_MODULES.items():
        if _is_installed(package):
            return importlib.import_module(module).ParallelMuonStrategy
    raise ImportError(
        f"ParallelMuonStrategy needs Lightning: none of {', '.join(_STRATEGY_MODULES)} is installed; "
        "pip install 'lightning-muon[lightning]'"
    )


def _register(package: ModuleType) -> None:
    registry = importlib.import_module(f"{package.__name__}.strategies").StrategyRegistry
    module = importlib.import_module(_STRATEGY_MODULES[package.__name__])
    if not hasattr(module, "ParallelMuonStrategy"):
        return  # It is being imported, which has brought the package; it calls register_strategies at its end.
    strategy_class = module.ParallelMuonStrategy
    for name, (description, arguments) in STRATEGIES.items():
        if name not in registry:
            registry.register(name, strategy_class, description=description, **arguments)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # The parent package is missing.
        return False
