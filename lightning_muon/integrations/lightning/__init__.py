"""The strategy of ``lightning.pytorch`` if that is installed, else of ``pytorch_lightning``; imports neither before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_muon.integrations.registry import trainer_strategy

if TYPE_CHECKING:
    from lightning_muon.integrations.lightning.strategy import TrainerStrategy as ParallelMuonStrategy

__all__ = ["ParallelMuonStrategy"]


def __getattr__(name: str) -> Any:
    if name == "ParallelMuonStrategy":
        return trainer_strategy()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
