"""Private names of transformers 5.23 that the package uses; tests/unit/compat/test_transformers.py watches them."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Any

from torch import nn
from transformers import Trainer, TrainingArguments

_OF_OPTIMIZERS = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim")


def decayed_names(model: nn.Module) -> set[str]:
    """Names of the parameters that a ``Trainer`` decays: all but biases and what belongs to a norm."""
    no_trainer: Any = None  # The method reads the model alone.
    return set(Trainer.get_decay_parameter_names(no_trainer, model))


def calling_arguments() -> dict[str, tuple[Any, bool]]:
    """``TrainingArguments`` of the ``Trainer`` whose method calls the caller: name -> (value, whether the user set it).

    A Trainer passes an optimizer factory the model alone. Empty for any other caller.
    """
    trainer = sys._getframe(2).f_locals.get("self")
    if not isinstance(trainer, Trainer):
        return {}
    defaults = {field.name: field.default for field in fields(TrainingArguments)}
    values = {name: getattr(trainer.args, name) for name in _OF_OPTIMIZERS}
    return {name: (value, value != defaults[name]) for name, value in values.items()}
