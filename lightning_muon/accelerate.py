"""For users of Hugging Face Accelerate: ``from lightning_muon.accelerate import Accelerator``. Needs ``accelerate``."""

from typing import Any

try:
    import accelerate  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'lightning_muon.accelerate needs Accelerate: pip install "lightning-muon[accelerate]"'
    ) from error

from lightning_muon.engine.options import Options
from lightning_muon.integrations.accelerate.accelerator import Accelerator
from lightning_muon.removed import removed

__all__ = ["Accelerator", "Options"]


def __getattr__(name: str) -> Any:
    raise ImportError(gone) if (gone := removed(name)) else AttributeError(name)
