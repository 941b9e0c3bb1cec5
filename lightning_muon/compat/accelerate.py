"""Private names of Accelerate 1.15 that the package uses; tests/unit/compat/test_accelerate.py watches them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Literal


def prepared_models(accelerator: Any) -> list[Any]:
    """The models that an Accelerator has prepared."""
    return accelerator._models


def mark_prepared(accelerator: Any, optimizer: Any) -> None:
    """Count ``optimizer`` among the prepared ones, and mark it as such."""
    accelerator._optimizers.append(optimizer)
    optimizer._is_accelerate_prepared = True


def is_prepared(value: Any) -> bool:
    """Whether ``Accelerator.prepare`` has returned this object."""
    return getattr(value, "_is_accelerate_prepared", False)


@contextmanager
def in_place_of_states(
    accelerator: Any,
    when: Literal["save", "load"],
    action: Callable[[str, bool], None],
    offer: Callable[[], Sequence[Any]] = tuple,
) -> Generator[None]:
    """Let ``action`` do what ``save_state`` or ``load_state`` does for models and optimizers; local.

    Accelerate's own order: with FSDP models and optimizers, then the hooks of the user with an empty list, then all
    else. Without FSDP the hooks come first, with a list of weights (save) or models (load); they take out what they
    have dealt with themselves, and Accelerate deals with the rest.

    Inside this context Accelerate finds no models and no optimizers, and hooks find ``accelerator._models`` as it was.
    If ``offer`` returns nothing, ``action(directory, True)`` runs before the hooks, as with FSDP. Else the hooks get
    that list, and ``action(directory, is_whole)`` runs behind them; ``is_whole``: they took nothing out of the list.
    """
    models, optimizers = accelerator._models, accelerator._optimizers

    def restore() -> None:
        accelerator._models, accelerator._optimizers = models, optimizers

    offered: list[Any] = []

    def begin(*arguments: Any) -> None:
        restore()
        offered.extend(offer())
        arguments[-2].extend(offered)
        if not offered:
            action(str(arguments[-1]), True)

    def end(*arguments: Any) -> None:
        if offered:
            action(str(arguments[-1]), len(arguments[-2]) == len(offered))
            arguments[-2].clear()

    register = getattr(accelerator, f"register_{when}_state_pre_hook")
    handles = [register(begin), register(end)]
    getattr(accelerator, f"_{when}_model_state_pre_hook").move_to_end(handles[0].id, last=False)
    accelerator._models, accelerator._optimizers = [], []
    try:
        yield
    finally:
        restore()
        for handle in handles:
            handle.remove()


def launch_on_cpus(arguments: Any) -> None:
    """Start torchrun on the CPUs of this machine, as ``accelerate launch`` does with these arguments."""
    from accelerate.commands import launch
    from accelerate.utils import patch_environment

    # With what the config file says.
    validated, _, _ = launch._validate_launch_command(arguments)
    with patch_environment(ACCELERATE_USE_CPU="true"):
        launch.multi_gpu_launcher(validated)
