"""The strategy and the callbacks for ``pytorch_lightning``, by paths that configuration files can name."""

from __future__ import annotations

from lightning_muon.integrations.registry import auto_resume_class, qk_clip_class, strategy_class

AutoResume = auto_resume_class("pytorch_lightning")
ParallelMuonStrategy = strategy_class("pytorch_lightning")
QKClip = qk_clip_class("pytorch_lightning")
