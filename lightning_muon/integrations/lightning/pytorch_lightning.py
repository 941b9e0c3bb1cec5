"""The strategy and the callbacks for ``pytorch_lightning``, by paths that configuration files can name."""

from __future__ import annotations

from lightning_muon.integrations.registry import make

AutoResume = make("AutoResume", "pytorch_lightning")
EMAWeights = make("EMAWeights", "pytorch_lightning")
MuonMonitor = make("MuonMonitor", "pytorch_lightning")
ParallelMuonStrategy = make("ParallelMuonStrategy", "pytorch_lightning")
