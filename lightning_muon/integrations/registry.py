"""Makes strategies and callbacks for the packages of Lightning; registers strategies with those that are imported."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Mapping
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

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
TRAINERS = {
    "lightning.pytorch": LightningPackage("lightning.pytorch"),
    "pytorch_lightning": LightningPackage("pytorch_lightning"),
}
FABRICS = {"lightning.fabric": TRAINERS["lightning.pytorch"], "lightning_fabric": TRAINERS["pytorch_lightning"]}


class _Mixed(NamedTuple):
    """A class of ours that is mixed with classes of each package."""

    module: str  # Of lightning_muon.integrations.
    name: str  # The class there that does the work.
    bases: tuple[str, ...]  # Further bases: module of the package, and class.
    packages: Mapping[str, LightningPackage] = TRAINERS  # In order of preference.


_MODEL_PARALLEL, _CALLBACK = "strategies.ModelParallelStrategy", "callbacks.Callback"
_SAVING = ("callbacks.OnExceptionCheckpoint", "callbacks.ModelCheckpoint")
CLASSES = {
    "ParallelMuonStrategy": _Mixed("lightning.strategy", "TrainerStrategy", (_MODEL_PARALLEL,)),
    "ParallelMuonFabricStrategy": _Mixed("fabric.strategy", "FabricStrategy", (_MODEL_PARALLEL,), FABRICS),
    "AutoResume": _Mixed("lightning.callbacks", "AutoResumeCallback", _SAVING),
    "EMAWeights": _Mixed("lightning.callbacks", "EMAWeightsCallback", (_CALLBACK,)),
    "MuonMonitor": _Mixed("lightning.callbacks", "MuonMonitorCallback", (_CALLBACK,)),
    "FirstCallback": _Mixed("lightning.trainer", "FirstCallback", (_CALLBACK,)),
}
# Where users find the classes that were made for a package, if not in ours.
_HOMES = {"pytorch_lightning": "lightning_muon.integrations.lightning.pytorch_lightning"}


def register(package: ModuleType) -> None:
    """Register :data:`STRATEGIES` with a package that has a Trainer or a Fabric."""
    strategies = importlib.import_module(f"{package.__name__}.strategies")
    registry = strategies.StrategyRegistry if package.__name__ in TRAINERS else strategies.STRATEGY_REGISTRY
    for name, (description, arguments) in STRATEGIES.items():
        if name not in registry:
            registry.register(name, strategy_class(package.__name__), description=description, **arguments)


def __getattr__(name: str) -> Any:
    # The class for the first package that is installed; none is imported before.
    if name not in CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return make(name, first_installed(CLASSES[name].packages, f"{name} needs Lightning"))


def strategy_class(package: str) -> type[Any]:
    """The strategy class for a package with a Trainer or a Fabric."""
    return make("ParallelMuonStrategy" if package in TRAINERS else "ParallelMuonFabricStrategy", package)


def make(name: str, package: str) -> type[Any]:
    """The class of this name, one of :data:`CLASSES`, for a package; always the same one."""
    paths = [base.split(".") for base in CLASSES[name].bases]
    # This import may be what registers, and so makes the class.
    return _make(name, package, tuple(getattr(importlib.import_module(f"{package}.{m}"), base) for m, base in paths))


@cache
def _make(name: str, package: str, bases: tuple[type[Any], ...]) -> type[Any]:
    mixed = CLASSES[name]
    ours = getattr(importlib.import_module(f"lightning_muon.integrations.{mixed.module}"), mixed.name)
    body = {
        "__doc__": ours.__doc__,
        "__module__": _HOMES.get(package, "lightning_muon"),
        "package": mixed.packages[package],
    }
    return type(name, (ours, *bases), body)


def first_installed(packages: Iterable[str], problem: str) -> str:
    """The first of ``packages`` that is installed, or a ``ModuleNotFoundError`` that begins with ``problem``."""
    for package in packages:
        if importlib.util.find_spec(package.partition(".")[0]) is not None:
            return package
    raise ModuleNotFoundError(
        f'{problem}: none of {", ".join(packages)} is installed; pip install "lightning-muon[lightning]"'
    )
