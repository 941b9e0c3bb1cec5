"""The strategy for ``pytorch_lightning``, by a path that configuration files can name."""

from __future__ import annotations

from lightning_muon.integrations.registry import trainer_strategy

ParallelMuonStrategy = trainer_strategy("pytorch_lightning")
