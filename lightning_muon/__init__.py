"""Distributed Muon for PyTorch, Lightning and Accelerate.

``import lightning_muon`` registers the strategies ``"parallel_muon"`` and ``"flexdemo"`` with Trainer and Fabric of
``lightning`` and of ``pytorch_lightning``; none is imported before the program itself does.
``lightning_muon.accelerate`` and ``lightning_muon.hf`` are for Accelerate and for the Trainer of transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_muon.config import MuonConfig
from lightning_muon.engine.options import Options
from lightning_muon.errors import NonFiniteGradientError
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.optimizer import FlexDeMo
from lightning_muon.flexdemo.replicators import (
    Components,
    DCTTopK,
    DiLoCo,
    ExchangeStep,
    Full,
    NoReplication,
    Random,
    Replicator,
    Slicing,
    Striding,
)
from lightning_muon.integrations.registry import register_strategies
from lightning_muon.optim.parallel_muon import ParallelMuon
from lightning_muon.sharding.base import ModeOptions
from lightning_muon.sharding.context_parallel import (
    context_attention,
    gather_sequence,
    pad_to_multiple,
    split_sequence,
)
from lightning_muon.sharding.modes import make_mode
from lightning_muon.sharding.weights import full_state_dict

if TYPE_CHECKING:
    from lightning_muon.integrations.fabric import ParallelMuonFabricStrategy
    from lightning_muon.integrations.lightning import ParallelMuonStrategy

__version__ = "0.1.0"
__all__ = [
    # optimizers, strategies and their options
    "FlexDeMo",
    "FlexDeMoConfig",
    "MuonConfig",
    "NonFiniteGradientError",
    "Options",
    "ParallelMuon",
    "ParallelMuonFabricStrategy",
    "ParallelMuonStrategy",
    # what nodes send each other
    "Components",
    "DCTTopK",
    "DiLoCo",
    "ExchangeStep",
    "Full",
    "NoReplication",
    "Random",
    "Replicator",
    "Slicing",
    "Striding",
    "Turn",
    # sharding without Lightning, whole weights
    "ModeOptions",
    "full_state_dict",
    "make_mode",
    # context parallelism
    "context_attention",
    "gather_sequence",
    "pad_to_multiple",
    "split_sequence",
]

# Another name of it.
Turn = ExchangeStep

register_strategies()


def __getattr__(name: str) -> Any:
    # Lightning, Accelerate and transformers are optional extras.
    if name == "ParallelMuonStrategy":
        from lightning_muon.integrations.lightning import ParallelMuonStrategy

        return ParallelMuonStrategy
    if name == "ParallelMuonFabricStrategy":
        from lightning_muon.integrations.fabric import ParallelMuonFabricStrategy

        return ParallelMuonFabricStrategy
    if name in ("accelerate", "hf"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
