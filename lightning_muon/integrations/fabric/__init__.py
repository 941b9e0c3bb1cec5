"""The strategy of ``lightning.fabric`` if that is installed, else of ``lightning_fabric``; imports neither before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_muon.integrations.registry import fabric_strategy

if TYPE_CHECKING:
    from lightning_muon.integrations.fabric.strategy import FabricStrategy as ParallelMuonFabricStrategy

__all__ = ["ParallelMuonFabricStrategy"]


def __getattr__(name: str) -> Any:
    if name == "ParallelMuonFabricStrategy":
        return fabric_strategy()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
