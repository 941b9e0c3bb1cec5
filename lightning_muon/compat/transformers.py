"""Private names of transformers 5 that the package uses; tests/unit/compat/test_frameworks.py watches them."""

from __future__ import annotations

import sys
from functools import wraps
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh


def calling_trainer() -> Any:
    """The ``self`` of the method that calls the caller: a Trainer passes its model alone to an optimizer factory."""
    return sys._getframe(2).f_locals.get("self")


def is_sharded_at_load(model: Any) -> bool:
    """Whether ``from_pretrained(distributed_config=...)`` has sharded a model, or that of a Trainer."""
    return getattr(model, "is_distributed_loading_by_transformers", False)


def mesh_of(model: Any) -> DeviceMesh:
    """The mesh on which ``from_pretrained`` has sharded a model."""
    return model._device_mesh


def make_folders_first(trainer: Any) -> None:
    """Let Trainers of a class make the folder of a checkpoint before ranks ask whether it is there.

    It is then the best one. With ``SHARDED_STATE_DICT`` rank 0 would make it while the others ask.
    """
    stock = trainer.save_model

    @wraps(stock)
    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if _internal_call and output_dir is not None and self.args.should_save:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
        stock(self, output_dir, _internal_call)

    trainer.save_model = save_model


class ShardedAtLoad:
    """Mixed with a ``Trainer``: saves and loads what :func:`is_sharded_at_load`, which Trainers refuse.

    Any other model is left to the Trainer. Subclasses have three methods, which take the folder of a checkpoint, and
    are collective over all ranks: one for model, optimizer and scheduler, and two that load the first and the rest.
    """

    save_states: Any
    load_weights: Any
    load_states: Any

    def __init__(self, model: Any = None, args: Any = None, *more: Any, **options: Any) -> None:
        mesh = getattr(model, "_device_mesh", None)
        if mesh is not None and not hasattr(model, "is_distributed_loading_by_transformers"):
            raise ValueError("this version of transformers does not train models that it has sharded; 5.19 does")
        # The refusal is in the constructor, and asks for this option.
        refused = args if is_sharded_at_load(model) and args is not None and not args.save_only_model else None
        if refused is not None:
            refused.save_only_model = True
        super().__init__(model, args, *more, **options)  # pyright: ignore[reportCallIssue]
        if refused is not None:
            refused.save_only_model = False

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        stock: Any = super()
        if is_sharded_at_load(self):
            self.save_states(Path(output_dir))
        else:
            stock._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        stock: Any = super()
        if is_sharded_at_load(self):
            self.load_weights(Path(resume_from_checkpoint))
        else:
            stock._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        stock: Any = super()
        if is_sharded_at_load(self) and checkpoint is not None:
            self.load_states(Path(checkpoint))
        else:
            stock._load_optimizer_and_scheduler(checkpoint)
