"""Private names of transformers that the package uses; tests/unit/compat/test_transformers.py fails when one moves."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import Trainer


def decayed_names(model: nn.Module) -> set[str]:
    """Names of the parameters that a ``Trainer`` decays: all but biases and what belongs to a norm.

    Calls ``Trainer.get_decay_parameter_names`` (5.23) without a Trainer, since it reads the model alone.
    """
    no_trainer: Any = None
    return set(Trainer.get_decay_parameter_names(no_trainer, model))
