"""Makes ``accelerate.Accelerator`` ours, for scripts that are to run unchanged."""

from __future__ import annotations

import importlib
from types import ModuleType

from wrapt import register_post_import_hook


def replace_accelerator() -> None:
    """Let ``from accelerate import Accelerator`` give our class from now on, and Trainers of transformers have it, too.

    Neither package is imported for that. For programs that a launcher of ours starts.
    """
    register_post_import_hook(_replace, "accelerate")
    register_post_import_hook(_replace_in_trainer, "transformers.trainer")


def _replace(package: ModuleType) -> None:
    ours = _classes().Accelerator
    package.Accelerator = ours  # type: ignore[attr-defined]
    package.accelerator.Accelerator = ours  # type: ignore[attr-defined]


def _replace_in_trainer(module: ModuleType) -> None:
    module.Accelerator = _classes().TrainerAccelerator  # type: ignore[attr-defined]


def _classes() -> ModuleType:
    return importlib.import_module("lightning_muon.integrations.accelerate.classes")
