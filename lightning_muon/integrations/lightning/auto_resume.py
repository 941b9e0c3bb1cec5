"""The callback ``AutoResume``: saves, and starts the next run of the program from what is intact."""

from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_muon.checkpoint.newest import newest_first


class AutoResumeCallback:
    """Saves checkpoints to ``dirpath``, and lets ``fit`` without ``ckpt_path`` go on from the newest intact one there.

    A run that was killed, and is started again by ``torchrun --max-restarts``, by SLURM or by hand, goes on by itself;
    the first one begins from the start. A damaged checkpoint is named in a warning, and the one before it is taken.

    Beside it are ``OnExceptionCheckpoint``, which a Trainer asks for a path, and ``ModelCheckpoint`` of one package.

    Args:
        dirpath: Folder of the checkpoints, which all ranks see; it belongs to one training.
        keep: How many of the newest ones stay; more than one, so that there is one before a damaged one.
        every_n_train_steps: Optimizer steps between two saves.
        train_time_interval: Time between two saves, in place of steps.
        every_n_epochs: Epochs between two saves, in place of steps; 1 if none of the three is given.

    Example::

        trainer = Trainer(strategy="parallel_muon", callbacks=[AutoResume("checkpoints", every_n_train_steps=500)])
        trainer.fit(model)
    """

    dirpath: str
    package: Any

    def __init__(
        self,
        dirpath: str,
        *,
        keep: int = 2,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"AutoResume(keep={keep}): keep at least 1 checkpoint, better 2")
        self.package.module("callbacks").ModelCheckpoint.__init__(
            self,
            dirpath=dirpath,
            monitor="step",  # The newest ones are those with most steps.
            mode="max",
            save_top_k=keep,
            every_n_train_steps=every_n_train_steps,
            train_time_interval=train_time_interval,
            every_n_epochs=every_n_epochs,
        )
        # Lightning takes a fit without ckpt_path for a question, if there is a callback of this kind.
        warnings.filterwarnings("ignore", message=r".*`\.fit\(ckpt_path=None\)` was called without a model")

    @property
    def ckpt_path(self) -> str:
        """The checkpoint to go on from, if there is one; local."""
        return next((str(path) for path in newest_first(Path(self.dirpath))), "")

    def on_exception(self, trainer: Any, *_: Any) -> None:
        """Nothing is saved: one rank may have failed alone."""

    def teardown(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Checkpoints stay."""


def is_chosen_by_trainer(trainer: Any, path: Path) -> bool:
    """Whether ``path`` is not the user's own choice, but that of ``ckpt_path="last"`` or of a callback; local."""
    names = (getattr(callback, "CHECKPOINT_NAME_LAST", None) for callback in trainer.checkpoint_callbacks)
    paths = (getattr(callback, "ckpt_path", None) for callback in trainer.checkpoint_callbacks)
    return any(name and name in path.name for name in names) or str(path) in paths
