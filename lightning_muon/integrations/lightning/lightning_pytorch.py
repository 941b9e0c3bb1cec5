"""The strategy for ``lightning.pytorch``."""

from __future__ import annotations

from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_muon.compat.lightning import LightningPackage
from lightning_muon.integrations.lightning.registry import register_strategies
from lightning_muon.integrations.lightning.strategy import ParallelMuonMixin


class ParallelMuonStrategy(ParallelMuonMixin, ModelParallelStrategy):  # noqa: D101
    __doc__ = ParallelMuonMixin.__doc__

    package = LightningPackage("lightning.pytorch")


# If the package is imported by this module, it was not there when the package looked for it.
register_strategies()
