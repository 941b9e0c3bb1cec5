"""The optimizer of a LightningModule that has no ``configure_optimizers``."""

from __future__ import annotations

from types import MethodType
from typing import Any

from lightning_utilities.core.overrides import is_overridden
from torch import nn

from lightning_muon.compat.lightning import LightningPackage
from lightning_muon.config import MuonConfig
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.optimizer import FlexDeMo
from lightning_muon.optim.parallel_muon import ParallelMuon
from lightning_muon.optim.planned_optimizer import PlannedOptimizer


def provide_default_optimizer(module: Any, config: MuonConfig | FlexDeMoConfig, package: LightningPackage) -> None:
    """Give a LightningModule without ``configure_optimizers`` one that returns a ParallelMuon, or a FlexDeMo.

    Lightning refuses to train without it, before the strategy is asked for anything else.
    """
    if is_overridden("configure_optimizers", module, package.module().LightningModule):
        return

    def configure_optimizers(self: nn.Module) -> PlannedOptimizer:
        kind = FlexDeMo if isinstance(config, FlexDeMoConfig) else ParallelMuon
        return kind.from_config(self.named_parameters(), config)  # type: ignore[arg-type]

    configure_optimizers.is_default = True  # type: ignore[attr-defined]
    module.configure_optimizers = MethodType(configure_optimizers, module)


def remove_default_optimizer(module: Any) -> None:
    """Undo :func:`provide_default_optimizer`."""
    if has_default_optimizer(module):
        del module.configure_optimizers


def has_default_optimizer(module: Any) -> bool:
    """Whether ``configure_optimizers`` is that of :func:`provide_default_optimizer`."""
    return getattr(vars(module).get("configure_optimizers"), "is_default", False)
