"""Private names of transformers 5.23 that the package uses; tests/unit/compat/test_transformers.py watches them."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import Trainer


def decayed_names(model: nn.Module) -> set[str]:
    """Names of the parameters that a ``Trainer`` decays: all but biases and what belongs to a norm."""
    no_trainer: Any = None  # The method reads the model alone.
    return set(Trainer.get_decay_parameter_names(no_trainer, model))
