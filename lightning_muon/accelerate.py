"""For users of Hugging Face Accelerate: ``from lightning_muon.accelerate import Accelerator``. Needs ``accelerate``."""

from lightning_muon.integrations.accelerate.classes import Accelerator, prepare
from lightning_muon.integrations.options import Options

__all__ = ["Accelerator", "Options", "prepare"]
