"""When gradients are there: hooks that do not keep their owner alive, and how often they are called."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor
from torch.utils.hooks import RemovableHandle

Owner = TypeVar("Owner")


@dataclass
class Arrivals:
    """How often the hook of a parameter is called in a step: more than once if backward reaches it in several ways.

    Learnt from the step before: accumulation in several passes, activation checkpointing.
    """

    expected: int = 1
    seen: int = 0

    def add(self) -> bool:
        """Count one; whether it is the last one that is expected."""
        self.seen += 1
        return self.seen == self.expected

    def begin_step(self) -> None:
        """Expect as many as there were."""
        self.expected, self.seen = max(1, self.seen), 0


def watch_gradients(
    owner: Owner, parameters: Iterable[Tensor], arrived: Callable[[Owner, Tensor], None]
) -> Callable[[], object]:
    """Call ``arrived(owner, parameter)`` whenever backward has added to ``parameter.grad``; local.

    The hooks go with ``owner``, also if it is dropped without a word: Python's garbage collector does not look into
    the hooks of tensors. Frozen parameters are watched for the time when they are not frozen.

    Returns:
        Removes the hooks.
    """
    reference = weakref.ref(owner)

    def hook(parameter: Tensor) -> None:
        alive = reference()
        if alive is not None:
            arrived(alive, parameter)

    return weakref.finalize(owner, _remove, [_register(parameter, hook) for parameter in parameters])


def _register(parameter: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Torch refuses hooks on frozen parameters, but keeps them while a parameter is frozen."""
    is_trainable = parameter.requires_grad
    handle = parameter.requires_grad_(True).register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(is_trainable)
    return handle


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
