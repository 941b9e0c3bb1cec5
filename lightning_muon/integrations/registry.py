"""Makes the strategy classes of Trainer and Fabric, and registers them with whichever package the program imports."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from functools import cache
from types import ModuleType
from typing import Any

from lightning_muon.compat.lightning import MONITOR_CANDIDATES, LightningPackage
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
# Callbacks, and the modules of `lightning/` that have them.
CALLBACKS = {"MuonMonitor": "muon_monitor", "QKClip": "qk_clip"}
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
    packages = {
        "AutoResume": TRAINERS,
        **dict.fromkeys(CALLBACKS, TRAINERS),
        "ParallelMuonStrategy": TRAINERS,
        "ParallelMuonFabricStrategy": FABRICS,
    }.get(name)
    if packages is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    package = first_installed(packages, f"{name} needs Lightning")
    if name in CALLBACKS:
        return callback_class(name, package)
    return auto_resume_class(package) if name == "AutoResume" else strategy_class(package)


def strategy_class(package: str) -> type[Any]:
    """The strategy class for a package with a Trainer or a Fabric."""
    # This import may be what registers, and so makes the class.
    return _make_class(package, importlib.import_module(f"{package}.strategies").ModelParallelStrategy)


@cache
def _make_class(package: str, base: type[Any]) -> type[Any]:
    if package in TRAINERS:
        from lightning_muon.integrations.lightning.strategy import TrainerStrategy as Ours

        name, known, user = "ParallelMuonStrategy", TRAINERS[package], f"Trainers of {package}"
    else:
        from lightning_muon.integrations.fabric.strategy import FabricStrategy as Ours

        name, known, user = "ParallelMuonFabricStrategy", FABRICS[package], "Fabric"
    body = {
        "__doc__": Ours.__doc__,
        "__module__": _HOMES.get(package, "lightning_muon"),
        "package": known,
        "user": user,
    }
    return type(name, (Ours, base), body)


@cache
def auto_resume_class(package: str) -> type[Any]:
    """The callback ``AutoResume`` for a package with a Trainer."""
    from lightning_muon.integrations.lightning.auto_resume import AutoResumeCallback as Ours
    from lightning_muon.integrations.lightning.auto_resume import add_steps

    callbacks = importlib.import_module(f"{package}.callbacks")
    bases = (Ours, callbacks.OnExceptionCheckpoint, callbacks.ModelCheckpoint)
    body = {"__doc__": Ours.__doc__, "__module__": _HOMES.get(package, "lightning_muon"), "package": TRAINERS[package]}
    body[MONITOR_CANDIDATES] = add_steps
    return type("AutoResume", bases, body)


@cache
def callback_class(name: str, package: str) -> type[Any]:
    """One of :data:`CALLBACKS` for a package with a Trainer."""
    ours = getattr(
        importlib.import_module(f"lightning_muon.integrations.lightning.{CALLBACKS[name]}"), f"{name}Callback"
    )
    body = {"__doc__": ours.__doc__, "__module__": _HOMES.get(package, "lightning_muon"), "package": TRAINERS[package]}
    return type(name, (ours, importlib.import_module(f"{package}.callbacks").Callback), body)


def first_installed(packages: Iterable[str], problem: str) -> str:
    """The first of ``packages`` that is installed, or a ``ModuleNotFoundError`` that begins with ``problem``."""
    for package in packages:
        if importlib.util.find_spec(package.partition(".")[0]) is not None:
            return package
    raise ModuleNotFoundError(
        f'{problem}: none of {", ".join(packages)} is installed; pip install "lightning-muon[lightning]"'
    )
