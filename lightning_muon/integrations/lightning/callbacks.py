"""Callbacks of Lightning that cannot work on shards, refused before they do harm."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
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
                    f"the callback {type(callback).__name__} does not work with ParallelMuonStrategy: "
                    f"{reason}. Instead, {instead}; or use another strategy."
                )


# Lightning calls these between a step and the next forward pass.
_BETWEEN_STEPS = ("on_before_zero_grad", "on_train_batch_end", "on_train_batch_start")
# And these where a step may have been the last one for a while.
_AT_ENDS = (
    *("on_train_epoch_start", "on_train_epoch_end", "on_validation_start", "on_validation_epoch_start"),
    *("on_train_end", "on_fit_end"),
)
_WITH_GRADIENTS = ("on_after_backward", "on_before_optimizer_step")


def reads_weights_between_steps(trainer: Any, package: LightningPackage) -> bool:
    """Whether code runs between two steps that may read weights other than through ``state_dict``.

    The module and every callback count that override one of the hooks there. Lightning's own callbacks read none, but
    for those that average weights.
    """
    known = package.module("callbacks")
    averaging = tuple(getattr(known, name) for name in _REFUSED if hasattr(known, name))
    suspects = [c for c in trainer.callbacks if isinstance(c, averaging) or _is_of_user(c, package)]
    hooked = (trainer.lightning_module, *suspects)
    return any(_overrides(each, hook) for each in hooked for hook in _BETWEEN_STEPS) or any(
        _overrides(trainer.lightning_module, hook) for hook in ("optimizer_step", "lr_scheduler_step")
    )


def reads_gradients(trainer: Any, package: LightningPackage) -> list[str]:
    """Hooks of the module and of the user's callbacks in which gradients are usually read."""
    hooked = (trainer.lightning_module, *(c for c in trainer.callbacks if _is_of_user(c, package)))
    return [f"{type(each).__name__}.{hook}" for each in hooked for hook in _WITH_GRADIENTS if _overrides(each, hook)]


def before_weights_are_read(package: LightningPackage, finish: Callable[[], None]) -> Any:
    """A callback for the head of the list: hooks at the ends of epochs and of the training find all new weights.

    Args:
        package: Of the Trainer.
        finish: Waits for the weights.
    """

    def wait(_: Any, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        finish()

    hooks = dict.fromkeys(_AT_ENDS, wait)
    return type("WeightsHaveArrived", (package.module("callbacks").Callback,), hooks)()


def _is_of_user(callback: Any, package: LightningPackage) -> bool:
    """Whether code of the user runs in it; ``LambdaCallback`` has its hooks as attributes."""
    is_foreign = type(callback).__module__.split(".")[0] != package.name.split(".")[0]
    return is_foreign or any(hook in vars(callback) for hook in (*_BETWEEN_STEPS, *_AT_ENDS, *_WITH_GRADIENTS))


def _overrides(hooked: Any, name: str) -> bool:
    """Whether a method is more than the one of Lightning's base classes."""
    defined_in = inspect.unwrap(getattr(type(hooked), name)).__qualname__.split(".")[0]
    return defined_in not in ("Callback", "ModelHooks", "LightningModule") or name in vars(hooked)
