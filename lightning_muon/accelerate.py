"""For users of Hugging Face Accelerate: ``from lightning_muon.accelerate import Accelerator``. Needs ``accelerate``."""

try:
    import accelerate  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'lightning_muon.accelerate needs Accelerate: pip install "lightning-muon[accelerate]"'
    ) from error

from lightning_muon.engine.options import Options
from lightning_muon.integrations.accelerate.accelerator import Accelerator, prepare

__all__ = ["Accelerator", "Options", "prepare"]
