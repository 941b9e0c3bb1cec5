"""Every private name of Accelerate that the package uses; tests/unit/compat/test_accelerate.py fails when one moves."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Literal


def prepared_models(accelerator: Any) -> list[Any]:
    """The models that an Accelerator has prepared. Uses ``Accelerator._models`` (1.15)."""
    return accelerator._models


def add_optimizer(accelerator: Any, optimizer: Any) -> None:
    """Count ``optimizer`` among the prepared ones, and mark it as such.

    Uses ``Accelerator._optimizers`` and the mark ``_is_accelerate_prepared`` (1.15).
    """
    accelerator._optimizers.append(optimizer)
    optimizer._is_accelerate_prepared = True


def is_prepared(value: Any) -> bool:
    """Whether ``Accelerator.prepare`` has returned this object. Uses the mark ``_is_accelerate_prepared`` (1.15)."""
    return getattr(value, "_is_accelerate_prepared", False)


@contextmanager
def in_place_of_states(
    accelerator: Any, when: Literal["save", "load"], action: Callable[[str], None]
) -> Generator[None]:
    """Let ``action(directory)`` do what ``save_state`` or ``load_state`` does for models and optimizers; local.

    Both deal with models, then optimizers, then call hooks, then deal with everything else. Inside this context they
    find no model and no optimizer. The first hook is ``action``; from it on they are there again, so that the hooks of
    the user see them.

    Uses ``Accelerator._models``, ``_optimizers``, ``_save_model_state_pre_hook`` and ``_load_model_state_pre_hook``
    (1.15).
    """
    models, optimizers = accelerator._models, accelerator._optimizers

    def restore() -> None:
        accelerator._models, accelerator._optimizers = models, optimizers

    def hook(*arguments: Any) -> None:
        restore()
        action(str(arguments[-1]))

    hooks = getattr(accelerator, f"_{when}_model_state_pre_hook")
    handle = getattr(accelerator, f"register_{when}_state_pre_hook")(hook)
    hooks.move_to_end(handle.id, last=False)
    accelerator._models, accelerator._optimizers = [], []
    try:
        yield
    finally:
        restore()
        handle.remove()


def launch_on_cpus(arguments: Any) -> None:
    """Start several processes on the CPUs of this machine, or this one of several, with torchrun.

    ``accelerate launch`` itself does so through mpirun only, and starts one process without it. Uses
    ``commands.launch._validate_launch_command`` (1.15), which merges the config file into the arguments.

    Args:
        arguments: Of ``accelerate launch``, parsed.
    """
    from accelerate.commands import launch
    from accelerate.utils import patch_environment

    validated, _, _ = launch._validate_launch_command(arguments)
    with patch_environment(ACCELERATE_USE_CPU="true"):
        launch.multi_gpu_launcher(validated)
