"""The strategy ``"parallel_muon"`` for ``lightning.pytorch`` and ``pytorch_lightning``.

Importing this module imports neither. ``ParallelMuonStrategy`` is the one of ``lightning.pytorch`` if that is
installed, else the one of ``pytorch_lightning``; the modules :mod:`.lightning_pytorch` and :mod:`.pytorch_lightning`
have both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_muon.integrations.lightning.registry import default_strategy_class, register_strategies

if TYPE_CHECKING:
    from lightning_muon.integrations.lightning.lightning_pytorch import ParallelMuonStrategy

__all__ = ["ParallelMuonStrategy", "register_strategies"]


def __getattr__(name: str) -> Any:
    if name == "ParallelMuonStrategy":
        return default_strategy_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
