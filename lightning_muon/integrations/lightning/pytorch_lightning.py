"""The strategy and the callbacks for ``pytorch_lightning``, by paths that configuration files can name."""

from __future__ import annotations

from lightning_muon.integrations.registry import auto_resume_class, callback_class, strategy_class

AutoResume = auto_resume_class("pytorch_lightning")
MuonMonitor = callback_class("MuonMonitor", "pytorch_lightning")
ParallelMuonStrategy = strategy_class("pytorch_lightning")
QKClip = callback_class("QKClip", "pytorch_lightning")
