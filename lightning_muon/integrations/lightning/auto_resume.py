"""The callback ``AutoResume``: saves, and starts the next run of the program from what is intact."""

from __future__ import annotations

import re
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from lightning_muon.checkpoint.newest import newest_first
from lightning_muon.comm.agreement import require_equal
from lightning_muon.compat.lightning import MONITOR_CANDIDATES, SAVE_TOP_K, SKIPS_SAVING, LightningPackage

_LAST = re.compile(r"last(-v\d+)?$")  # How Lightning names the last checkpoint.
PREFIX_OF_REQUEUE = "hpc_ckpt_"  # Lightning's names of checkpoints that it saves for SLURM's requeue.


class AutoResumeCallback:
    """Saves checkpoints to ``dirpath``, and lets ``fit`` without ``ckpt_path`` go on from the newest intact one there.

    A run that was killed, and is started again by ``torchrun --max-restarts``, by SLURM or by hand, goes on by itself;
    the first one begins from the start. A damaged checkpoint is named in a warning, and the one before it is taken.

    Its base classes are this one, ``OnExceptionCheckpoint``, because a Trainer asks such callbacks for a path, and
    ``ModelCheckpoint``, each of one Lightning package. The strategy moves it behind each ``ModelCheckpoint`` of yours,
    because ``ckpt_path="best"`` means the first callback.

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
            dirpath=str(dirpath),
            monitor="step",  # The newest ones are those with most steps.
            mode="max",
            save_top_k=-1,
            every_n_train_steps=every_n_train_steps,
            train_time_interval=train_time_interval,
            every_n_epochs=every_n_epochs,
        )
        self._keep = keep
        # Lightning takes a fit without ckpt_path for a question, if there is a callback of this kind.
        for text in (
            r"`\.fit\(ckpt_path=None\)` was called without",
            r"\.fit\(ckpt_path=\"last\"\) is set, but there is no",
        ):
            warnings.filterwarnings("ignore", message=f".*{text}")

    @property
    def state_key(self) -> str:
        """Under which a checkpoint has the state, whatever the intervals."""
        return "AutoResume"

    @property
    def ckpt_path(self) -> str:
        """The checkpoint to go on from, if there is one; local."""
        path = next(iter(newest_first(Path(self.dirpath))), None)
        return "" if path is None else str(path)

    def on_exception(self, trainer: Any, _: Any, exception: BaseException) -> None:
        """Save if SIGTERM or Ctrl-C ends all ranks after the same batch; else one rank may have failed alone."""
        told_to_end = isinstance(exception, self.package.module("utilities.exceptions").SIGTERMException)
        if told_to_end and not getattr(self, SKIPS_SAVING)(trainer):
            getattr(self, SAVE_TOP_K)(trainer, getattr(self, MONITOR_CANDIDATES)(trainer))

    def teardown(self, *_: Any, **__: Any) -> None:
        """Checkpoints stay, unlike those of ``OnExceptionCheckpoint``."""


def _candidates_with_steps(callback: Any, trainer: Any) -> dict[str, Any]:
    """Values that ``ModelCheckpoint`` may choose by; ``step`` is the Trainer's, whatever a program logs so."""
    found = getattr(super(AutoResumeCallback, callback), MONITOR_CANDIDATES)(trainer)
    return found | {"step": torch.tensor(trainer.global_step)}


def _save_and_remove(callback: Any, trainer: Any, found: dict[str, Any]) -> None:
    """Save, and keep the newest in the folder, those of earlier runs among them, but what other callbacks keep."""
    getattr(super(AutoResumeCallback, callback), SAVE_TOP_K)(trainer, found)
    newest = max(callback.best_k_models, key=callback.best_k_models.get)  # It may be written later.
    others = [each for each in trainer.checkpoint_callbacks if each is not callback and hasattr(each, "best_k_models")]
    kept = {path for each in others for path in (each.best_model_path, each.last_model_path, *each.best_k_models)}
    in_folder = [str(path) for path in newest_first(Path(callback.dirpath)) if PREFIX_OF_REQUEUE not in path.name]
    for path in [path for path in in_folder if path != newest and path not in kept][callback._keep - 1 :]:
        callback.best_k_models.pop(path, None)
        trainer.strategy.remove_checkpoint(path)


setattr(AutoResumeCallback, MONITOR_CANDIDATES, _candidates_with_steps)
setattr(AutoResumeCallback, SAVE_TOP_K, _save_and_remove)


def order(callbacks: list[Any]) -> None:
    """Move each :class:`AutoResumeCallback` behind all others, in place; local."""
    callbacks.sort(key=lambda callback: isinstance(callback, AutoResumeCallback))


def share_metrics(callback: Any, package: LightningPackage) -> None:
    """Let a ``ModelCheckpoint`` choose and name by the metrics of rank 0, with one path on all ranks; local."""
    if not isinstance(callback, package.module("callbacks").ModelCheckpoint):
        return
    own = getattr(callback, MONITOR_CANDIDATES)

    def of_first_rank(trainer: Any) -> dict[str, Any]:
        found = {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in own(trainer).items()}
        # After an exception this rank may be alone.
        return found if trainer.state.status == "interrupted" else trainer.strategy.broadcast(found)

    vars(callback)[MONITOR_CANDIDATES] = of_first_rank


def candidates(trainer: Any, path: Path) -> list[Path]:
    """Checkpoints that a fit may go on from, best first: ``path``, and if the user did not name it, those beside it.

    Local. ``path`` is the choice of ``ckpt_path="last"``, of :class:`AutoResumeCallback`, or of SLURM's requeue. The
    checkpoint of a requeue, which Lightning takes whenever there is one, may be older than others.
    """
    auto = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, AutoResumeCallback)]
    is_of_requeue = path.name.startswith(PREFIX_OF_REQUEUE)
    if not (is_of_requeue or _LAST.match(path.stem) or any(Path(callback.ckpt_path) == path for callback in auto)):
        return [path]
    every = newest_first(path.parent, *(Path(callback.dirpath) for callback in auto))
    return every if is_of_requeue and path in every else [path, *(other for other in every if other != path)]


def require_same_checkpoint(path: Path | None) -> None:
    """Raise on all ranks unless they go on from the same checkpoint, or from none.

    Collective over all ranks, where it has chosen.
    """
    require_equal([("ckpt_path", "none" if path is None else str(path))], None, "the checkpoint to resume from")
