"""Distributed Muon for PyTorch, Lightning and Accelerate.

``import lightning_muon`` registers the strategies ``"parallel_muon"`` and ``"flexdemo"`` with Trainer and Fabric of
``lightning`` and of ``pytorch_lightning``; none is imported before the program itself does.
``lightning_muon.accelerate`` and ``lightning_muon.hf`` are for Accelerate and for the Trainer of transformers.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from wrapt import register_post_import_hook

if TYPE_CHECKING:
    from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
    from lightning.pytorch.strategies import ModelParallelStrategy

    from lightning_muon.config import MuonConfig as MuonConfig
    from lightning_muon.engine.options import Options as Options
    from lightning_muon.errors import NonFiniteGradientError as NonFiniteGradientError
    from lightning_muon.flexdemo.config import FlexDeMoConfig as FlexDeMoConfig
    from lightning_muon.flexdemo.optimizer import FlexDeMo as FlexDeMo
    from lightning_muon.flexdemo.replicators import Components as Components
    from lightning_muon.flexdemo.replicators import DCTTopK as DCTTopK
    from lightning_muon.flexdemo.replicators import DiLoCo as DiLoCo
    from lightning_muon.flexdemo.replicators import ExchangeStep as ExchangeStep
    from lightning_muon.flexdemo.replicators import Full as Full
    from lightning_muon.flexdemo.replicators import NoReplication as NoReplication
    from lightning_muon.flexdemo.replicators import Random as Random
    from lightning_muon.flexdemo.replicators import Replicator as Replicator
    from lightning_muon.flexdemo.replicators import Slicing as Slicing
    from lightning_muon.flexdemo.replicators import Striding as Striding
    from lightning_muon.flexdemo.replicators import Turn as Turn
    from lightning_muon.integrations.fabric.strategy import FabricStrategy
    from lightning_muon.integrations.lightning.strategy import TrainerStrategy
    from lightning_muon.optim.parallel_muon import ParallelMuon as ParallelMuon
    from lightning_muon.pipeline.runtime import forward_backward as forward_backward
    from lightning_muon.schedule.pipeline import register_schedule as register_schedule
    from lightning_muon.sharding.base import ModeOptions as ModeOptions
    from lightning_muon.sharding.context_parallel import context_attention as context_attention
    from lightning_muon.sharding.context_parallel import gather_sequence as gather_sequence
    from lightning_muon.sharding.context_parallel import pad_to_multiple as pad_to_multiple
    from lightning_muon.sharding.context_parallel import split_sequence as split_sequence
    from lightning_muon.sharding.modes import make_mode as make_mode
    from lightning_muon.sharding.weights import full_state_dict as full_state_dict

    # What integrations/registry.py makes of the installed Lightning package.
    class ParallelMuonFabricStrategy(FabricStrategy, FabricModelParallelStrategy):
        pass

    class ParallelMuonStrategy(TrainerStrategy, ModelParallelStrategy):
        pass


__version__ = "0.1.0"
# Module -> its public names. Torch is imported when one of them is used, and each framework's package when the program
# does.
_PUBLIC = {
    "config": "MuonConfig",
    "engine.options": "Options",
    "errors": "NonFiniteGradientError",
    "flexdemo.config": "FlexDeMoConfig",
    "flexdemo.optimizer": "FlexDeMo",
    "flexdemo.replicators": (
        "Components DCTTopK DiLoCo ExchangeStep Full NoReplication Random Replicator Slicing Striding Turn"
    ),
    "integrations.registry": "ParallelMuonFabricStrategy ParallelMuonStrategy",
    "optim.parallel_muon": "ParallelMuon",
    "pipeline.runtime": "forward_backward",
    "schedule.pipeline": "register_schedule",
    "sharding.base": "ModeOptions",
    "sharding.context_parallel": "context_attention gather_sequence pad_to_multiple split_sequence",
    "sharding.modes": "make_mode",
    "sharding.weights": "full_state_dict",
}

__all__ = [name for names in _PUBLIC.values() for name in names.split()]  # pyright: ignore[reportUnsupportedDunderAll]

for _package in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"):
    register_post_import_hook("lightning_muon.integrations.registry:register", _package)


def __getattr__(name: str) -> Any:
    for module, names in _PUBLIC.items():
        if name in names.split():
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
