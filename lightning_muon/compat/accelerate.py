"""Private names of Accelerate 1.15 that the package uses; tests/unit/compat/test_frameworks.py watches them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Literal


def mark_prepared(accelerator: Any, optimizer: Any) -> None:
    """Count ``optimizer`` among the prepared ones, and mark it as such."""
    accelerator._optimizers.append(optimizer)
    optimizer._is_accelerate_prepared = True


def is_prepared(value: Any) -> bool:
    """Whether ``Accelerator.prepare`` has returned this object."""
    return getattr(value, "_is_accelerate_prepared", False)


@contextmanager
def in_place_of_states(
    accelerator: Any, when: Literal["save", "load"], action: Callable[[str], None]
) -> Generator[None]:
    """Let ``action(directory)`` do what ``save_state`` or ``load_state`` does for models and optimizers; local.

    As with FSDP it comes before the hooks of the user, which get an empty list of weights (save) or models (load).
    """
    models, optimizers = accelerator._models, accelerator._optimizers

    def restore() -> None:
        accelerator._models, accelerator._optimizers = models, optimizers

    def begin(*arguments: Any) -> None:
        restore()
        action(str(arguments[-1]))

    handle = getattr(accelerator, f"register_{when}_state_pre_hook")(begin)
    getattr(accelerator, f"_{when}_model_state_pre_hook").move_to_end(handle.id, last=False)
    accelerator._models, accelerator._optimizers = [], []
    try:
        yield
    finally:
        restore()
        handle.remove()


def launch_on_cpus(arguments: Any) -> None:
    """Start torchrun on the CPUs of this machine, as ``accelerate launch`` does with these arguments."""
    from accelerate.commands import launch
    from accelerate.utils import patch_environment

    # With what the config file says.
    validated, _, _ = launch._validate_launch_command(arguments)
    with patch_environment(ACCELERATE_USE_CPU="true"):
        launch.multi_gpu_launcher(validated)
