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


class _Made(NamedTuple):
    """A class that is made for each package."""

    place: str  # Module of integrations/, and the class there that does the work.
    bases: str  # Module of the package, and its classes that are the other bases.
    packages: Mapping[str, LightningPackage]  # Those that it is made for, in order of preference.


CLASSES = {
    "ParallelMuonStrategy": _Made("lightning.strategy TrainerStrategy", "strategies ModelParallelStrategy", TRAINERS),
    "ParallelMuonFabricStrategy": _Made("fabric.strategy FabricStrategy", "strategies ModelParallelStrategy", FABRICS),
    "AutoResume": _Made(
        "lightning.auto_resume AutoResumeCallback", "callbacks OnExceptionCheckpoint ModelCheckpoint", TRAINERS
    ),
    "MuonMonitor": _Made("lightning.muon_monitor MuonMonitorCallback", "callbacks Callback", TRAINERS),
    "FirstCallback": _Made("lightning.first_callback FirstCallback", "callbacks Callback", TRAINERS),
    "QKClip": _Made("lightning.qk_clip QKClipCallback", "callbacks Callback", TRAINERS),
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
    module, *bases = CLASSES[name].bases.split()
    # This import may be what registers, and so makes the class.
    beside = importlib.import_module(f"{package}.{module}")
    return _make(name, package, tuple(getattr(beside, base) for base in bases))


@cache
def _make(name: str, package: str, bases: tuple[type[Any], ...]) -> type[Any]:
    module, class_name = CLASSES[name].place.split()
    ours = getattr(importlib.import_module(f"lightning_muon.integrations.{module}"), class_name)
    body = {
        "__doc__": ours.__doc__,
        "__module__": _HOMES.get(package, "lightning_muon"),
        "package": CLASSES[name].packages[package],
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
