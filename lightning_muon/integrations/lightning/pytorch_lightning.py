"""The strategy and the callback for ``pytorch_lightning``, by paths that configuration files can name."""

from __future__ import annotations

from lightning_muon.integrations.registry import auto_resume_class, strategy_class

AutoResume = auto_resume_class("pytorch_lightning")
ParallelMuonStrategy = strategy_class("pytorch_lightning")
