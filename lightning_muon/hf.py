"""For users of ``transformers.Trainer``: ``Trainer(optimizer_cls_and_kwargs=lightning_muon.hf.optimizer(lr=3e-4))``."""

from lightning_muon.integrations.transformers.monitor import MuonMonitor
from lightning_muon.integrations.transformers.optimizer import optimizer
from lightning_muon.integrations.transformers.trainer import Trainer

__all__ = ["MuonMonitor", "Trainer", "optimizer"]
