"""Callbacks of Lightning that cannot work on shards, refused before they do harm."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from lightning_muon.compat.lightning import LightningPackage

_AVERAGE_INSTEAD = (
    "save checkpoints with ModelCheckpoint and ParallelMuonStrategy(save_distributed_checkpoint=False), and average "
    "their 'state_dict' entries after the training"
)
# Callback class -> (why, what to use in its place)
_REFUSED = {
    "StochasticWeightAveraging": ("it copies whole weights and averages them with shards", _AVERAGE_INSTEAD),
    "WeightAveraging": ("it copies whole weights and averages them with shards", _AVERAGE_INSTEAD),
    "ModelPruning": (
        "it puts masks on whole weights",
        "prune after the training, on the module that load_from_checkpoint returns",
    ),
}


def refuse_callbacks(callbacks: Iterable[Any], package: LightningPackage) -> None:
    """Raise ``ValueError`` for the first callback that would fail, or be wrong, on sharded weights."""
    known = package.module("callbacks")
    for callback in callbacks:
        for name, (reason, instead) in _REFUSED.items():
            if isinstance(callback, getattr(known, name, ())):
                raise ValueError(
                    f"the callback {type(callback).__name__} does not work with the strategy 'parallel_muon': "
                    f"{reason}. Instead, {instead}; or use another strategy."
                )


# Lightning calls these between a step and the next forward pass.
_BETWEEN_STEPS = ("on_before_zero_grad", "on_train_batch_end", "on_train_batch_start")


def reads_weights_between_steps(trainer: Any, package: LightningPackage) -> bool:
    """Whether code runs between two steps that may read weights other than through ``state_dict``.

    The module and every callback count that override one of the hooks there. Lightning's own callbacks read none, but
    for those that average weights.
    """
    known = package.module("callbacks")
    averaging = tuple(getattr(known, name) for name in _REFUSED if hasattr(known, name))
    own = package.name.split(".")[0]
    suspects = [
        callback
        for callback in trainer.callbacks
        if isinstance(callback, averaging) or type(callback).__module__.split(".")[0] != own
    ]
    hooked = (trainer.lightning_module, *suspects)
    return any(_overrides(each, hook) for each in hooked for hook in _BETWEEN_STEPS)


def _overrides(hooked: Any, name: str) -> bool:
    """Whether a method is more than the empty one of Lightning's base classes."""
    defined_in = inspect.unwrap(getattr(type(hooked), name)).__qualname__.split(".")[0]
    return defined_in not in ("Callback", "ModelHooks") or name in vars(hooked)
