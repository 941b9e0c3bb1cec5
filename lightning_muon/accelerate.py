"""For users of Hugging Face Accelerate: ``from lightning_muon.accelerate import Accelerator``. Needs ``accelerate``."""

from lightning_muon.engine.options import Options
from lightning_muon.integrations.accelerate.accelerator import Accelerator, prepare

__all__ = ["Accelerator", "Options", "prepare"]
