"""Distributed Muon for PyTorch, Lightning and Accelerate.

``import lightning_muon`` registers the strategies ``"parallel_muon"`` and ``"flexdemo"`` with ``lightning.pytorch`` and
``pytorch_lightning``; neither is imported before the program itself does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_muon.config import MuonConfig
from lightning_muon.errors import NonFiniteGradientError
from lightning_muon.integrations.lightning.registry import register_strategies
from lightning_muon.optim.flexdemo.config import FlexDeMoConfig
from lightning_muon.optim.flexdemo.flexdemo import FlexDeMo
from lightning_muon.optim.parallel_muon import ParallelMuon
from lightning_muon.replicators.dct_topk import DCTTopK
from lightning_muon.replicators.diloco import DiLoCo
from lightning_muon.replicators.full import Full
from lightning_muon.replicators.none import NoReplication
from lightning_muon.replicators.random import Random
from lightning_muon.replicators.replicator import Components, Replicator, Turn
from lightning_muon.replicators.slicing import Slicing
from lightning_muon.replicators.striding import Striding
from lightning_muon.sharding.context_parallel import (
    context_attention,
    gather_sequence,
    pad_to_multiple,
    split_sequence,
)
from lightning_muon.sharding.full_weights import full_state_dict
from lightning_muon.sharding.modes.mode import ModeOptions
from lightning_muon.sharding.modes.registry import make_mode

if TYPE_CHECKING:
    from lightning_muon.integrations.lightning import ParallelMuonStrategy

__version__ = "0.1.0"
__all__ = [
    # optimizers and strategy
    "FlexDeMo",
    "FlexDeMoConfig",
    "MuonConfig",
    "NonFiniteGradientError",
    "ParallelMuon",
    "ParallelMuonStrategy",
    # what nodes send each other
    "Components",
    "DCTTopK",
    "DiLoCo",
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

register_strategies()


def __getattr__(name: str) -> Any:
    if name == "ParallelMuonStrategy":
        from lightning_muon.integrations.lightning import ParallelMuonStrategy  # Lightning is an optional extra.

        return ParallelMuonStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
