"""The strategy for ``pytorch_lightning``, by a path that configuration files can name."""

from __future__ import annotations

from lightning_muon.integrations.registry import strategy_class

ParallelMuonStrategy = strategy_class("pytorch_lightning")
