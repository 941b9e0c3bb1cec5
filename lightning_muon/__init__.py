"""Distributed Muon for PyTorch, Lightning and Accelerate.

``import lightning_muon`` registers the strategies ``"parallel_muon"`` and ``"flexdemo"`` with Trainer and Fabric of
``lightning`` and of ``pytorch_lightning``; none is imported before the program itself does.
``lightning_muon.accelerate`` and ``lightning_muon.hf`` are for Accelerate and for the Trainer of transformers.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from wrapt import register_post_import_hook

from lightning_muon.config import VERSION
from lightning_muon.removed import removed

if TYPE_CHECKING:
    from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy

    from lightning_muon.checkpoint.saving import full_state_dict
    from lightning_muon.config import MuonConfig
    from lightning_muon.engine.options import Options
    from lightning_muon.errors import DamagedCheckpointError, NonFiniteGradientError
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
    from lightning_muon.integrations.fabric.strategy import FabricStrategy
    from lightning_muon.integrations.lightning.callbacks import (
        AutoResumeCallback,
        EMAWeightsCallback,
        MuonMonitorCallback,
    )
    from lightning_muon.integrations.lightning.strategy import TrainerStrategy
    from lightning_muon.monitor.signals import StopSignals
    from lightning_muon.monitor.step_monitor import StepMonitor
    from lightning_muon.optim.parallel_muon import ParallelMuon
    from lightning_muon.pipeline.runtime import forward_backward
    from lightning_muon.schedule.pipeline import register_schedule
    from lightning_muon.sharding.base import ModeOptions
    from lightning_muon.sharding.context_parallel import gather_sequence, split_sequence
    from lightning_muon.sharding.modes import make_mode

    # What integrations/registry.py makes of the installed Lightning package.
    class ParallelMuonFabricStrategy(FabricStrategy, FabricModelParallelStrategy):  # noqa: D101
        pass

    class AutoResume(AutoResumeCallback, OnExceptionCheckpoint, ModelCheckpoint):  # noqa: D101
        pass

    class EMAWeights(EMAWeightsCallback, Callback):  # noqa: D101
        pass

    class MuonMonitor(MuonMonitorCallback, Callback):  # noqa: D101
        pass

    class ParallelMuonStrategy(TrainerStrategy, ModelParallelStrategy):  # noqa: D101
        pass


__all__ = [
    # optimizers, strategies and their options
    "AutoResume",
    "DamagedCheckpointError",
    "EMAWeights",
    "FlexDeMo",
    "FlexDeMoConfig",
    "MuonConfig",
    "MuonMonitor",
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
    # loops of your own
    "StepMonitor",
    "StopSignals",
    # pipelines
    "forward_backward",
    "register_schedule",
    # sharding without Lightning, whole weights
    "ModeOptions",
    "full_state_dict",
    "make_mode",
    # context parallelism
    "gather_sequence",
    "split_sequence",
]

__version__ = VERSION
# Where the names are: torch is imported when one of them is used, and each framework's package when the program does.
_MODULES = {
    "checkpoint.saving": "full_state_dict",
    "config": "MuonConfig",
    "engine.options": "Options",
    "errors": "DamagedCheckpointError NonFiniteGradientError",
    "flexdemo.config": "FlexDeMoConfig",
    "flexdemo.optimizer": "FlexDeMo",
    "flexdemo.replicators": (
        "Components DCTTopK DiLoCo ExchangeStep Full NoReplication Random Replicator Slicing Striding"
    ),
    "integrations.registry": "AutoResume EMAWeights MuonMonitor ParallelMuonFabricStrategy ParallelMuonStrategy",
    "monitor.signals": "StopSignals",
    "monitor.step_monitor": "StepMonitor",
    "optim.parallel_muon": "ParallelMuon",
    "pipeline.runtime": "forward_backward",
    "schedule.pipeline": "register_schedule",
    "sharding.base": "ModeOptions",
    "sharding.context_parallel": "gather_sequence split_sequence",
    "sharding.modes": "make_mode",
}

for _package in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"):
    register_post_import_hook("lightning_muon.integrations.registry:register", _package)


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names.split():
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
        return importlib.import_module(f"{__name__}.{name}")
    gone = removed(name)
    if gone is not None:
        # Of an AttributeError `from lightning_muon import name` would not show the text.
        raise ImportError(gone)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
