"""The callbacks of a Trainer.

``EMAWeights`` averages each rank's own shards over the steps, ``MuonMonitor`` logs numbers of steps, and ``AutoResume``
saves, and starts the next run of the program from what is intact.
"""

from __future__ import annotations

import re
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_muon.checkpoint.loading import newest_first
from lightning_muon.compat.lightning import MONITOR_CANDIDATES, SAVE_TOP_K, SKIPS_SAVING, LightningPackage
from lightning_muon.config import check_number, check_whole, takes_options
from lightning_muon.flexdemo.replicators import LocalSteps
from lightning_muon.monitor.step_monitor import StepMonitor
from lightning_muon.params.layers import clean_name
from lightning_muon.params.layout import local_tensor

AVERAGE = "average_state_dict"  # Its key in a checkpoint.


@takes_options()
class EMAWeightsCallback:
    """Averages weights over the steps, each rank those that it holds: ``average = decay * average + (1 - decay) * w``.

    Validation sees the average, and the model has it after ``fit``. Checkpoints have the weights of the training, and
    the average beside them under ``average_state_dict``; a run on other ranks, or with another ``sharding``, goes on
    with both. Buffers, such as running statistics, are those of the training. As the ``EMAWeightAveraging`` of
    Lightning, which needs whole weights on every rank; not for pipelines and DiLoCo.

    Its base classes are this one, and the ``Callback`` of one Lightning package.

    Args:
        decay: Share of the average that stays.
        every_n_steps: Average after the first of every so many optimizer steps; at first the average is the weights.

    Raises:
        ValueError: For a wrong value, a pipeline, DiLoCo, or a strategy that is not of this package; on every rank.

    Example::

        trainer = Trainer(strategy="parallel_muon", callbacks=[EMAWeights(decay=0.999)])
        trainer.fit(model)
    """

    def __init__(self, decay: float = 0.999, every_n_steps: int = 1) -> None:
        check_number("decay", decay)
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be at least 0 and less than 1, got {decay!r}")
        check_whole("every_n_steps", every_n_steps, at_least=1)
        self.decay, self.every_n_steps = decay, every_n_steps
        self.averages: dict[str, Tensor] = {}  # By the names of the weights, and divided as they are; during a fit.
        self._num_steps = 0
        self._global_step = 0  # As last seen; several optimizers make it grow by more than one.
        self._held: list[Tensor] = []  # This rank's parts of the weights, while the model has the averages.

    def setup(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Refuse what has no average of its own on every rank; local, alike on all ranks."""
        strategy = trainer.strategy
        if not hasattr(strategy, "load_averages"):
            raise ValueError(f"EMAWeights does not go with {type(strategy).__name__}; use EMAWeightAveraging there")
        options = strategy.options
        has_mains = options.sharding == "zero2" and trainer.precision == "bf16-true"
        refused = {
            f"pipeline_size={options.pipeline_size}": options.pipeline_size > 1,
            "sharding='zero2' and precision='bf16-true', which round the weights that all ranks have": has_mains,
            "DiLoCo, whose nodes have weights of their own": options.has_nodes
            and isinstance(options.config.replicator, LocalSteps),
        }
        for what in (what for what, is_so in refused.items() if is_so):
            raise ValueError(f"EMAWeights does not go with {what}; remove one of them")

    def on_fit_start(self, trainer: Any, module: nn.Module) -> None:
        """Begin with the averages of the checkpoint, or without any. Collective over all ranks."""
        # In 16 bits small steps towards the weights would be lost.
        self.averages = {
            name: weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
            for name, weight in _weights(module).items()
        }
        if not trainer.strategy.load_averages(self.averages):
            self._num_steps = 0

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        """Count from here; local."""
        self._global_step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, module: nn.Module, *_: Any) -> None:
        """Average if the batch has ended a step; local."""
        has_stepped, self._global_step = trainer.global_step != self._global_step, trainer.global_step
        self._num_steps += has_stepped
        if not has_stepped or (self._num_steps - 1) % self.every_n_steps:
            return
        trainer.strategy.finish_parameters()
        for average, weight in self._pairs(module):
            average.lerp_(weight.to(average.dtype), 1 - self.decay if self._num_steps > 1 else 1.0)

    def on_validation_epoch_start(self, trainer: Any, module: nn.Module) -> None:
        """Evaluate with the averages; local."""
        if not self._num_steps or not self.averages:
            return
        trainer.strategy.finish_parameters()
        self._held = [weight.clone() for _, weight in self._pairs(module)]
        self._take(module)
        trainer.strategy.weights_have_changed()

    def on_validation_epoch_end(self, trainer: Any, module: nn.Module, *_: Any) -> None:
        """Train on with the weights, which a checkpoint has that is saved after an exception, too; local."""
        if not self._held:
            return
        for (_average, weight), held in zip(self._pairs(module), self._held, strict=True):
            weight.copy_(held)
        self._held = []
        trainer.strategy.weights_have_changed()

    on_exception = on_validation_epoch_end

    def on_fit_end(self, trainer: Any, module: nn.Module) -> None:
        """Leave the averages in the model; local."""
        if self._num_steps:
            self._take(module)
        trainer.strategy.weights_have_changed()
        self.averages = {}

    def on_save_checkpoint(self, trainer: Any, _: Any, checkpoint: dict[str, Any]) -> None:
        """Save the averages, too. Collective over all ranks."""
        if self._num_steps and self.averages:
            checkpoint[AVERAGE] = trainer.strategy.averages_to_save(self.averages)

    def state_dict(self) -> dict[str, int]:
        """The number of steps."""
        return {"num_steps": self._num_steps}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on from :meth:`state_dict`."""
        self._num_steps = state_dict["num_steps"]

    def _take(self, module: nn.Module) -> None:
        for average, weight in self._pairs(module):
            weight.copy_(average)

    def _pairs(self, module: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """This rank's part of each average, and of the weight."""
        weights = _weights(module)
        return [(local_tensor(average), local_tensor(weights[name])) for name, average in self.averages.items()]


def _weights(module: nn.Module) -> dict[str, Tensor]:
    named = {clean_name(name): parameter.detach() for name, parameter in module.named_parameters()}
    return {name: weight for name, weight in named.items() if weight.is_floating_point()}


@takes_options()
class MuonMonitorCallback:
    """Measures every n-th optimizer step, and logs what it found: milliseconds by part, sizes of updates, bytes.

    docs/monitor.md says what each number means. Every logger of the Trainer gets them. Steps that are not measured cost
    nothing but a count. Works with any strategy; without one of ours, there are no parts of the step. Tokens per second
    and FLOPs are numbers of Lightning's ``ThroughputMonitor``.

    Its base classes are this one, and the ``Callback`` of one Lightning package.

    Args:
        every_n_steps: Measure every so many optimizer steps.

    Raises:
        ValueError: For several optimizers, on every rank.

    Example::

        trainer = Trainer(strategy="parallel_muon", callbacks=[MuonMonitor()])
        trainer.fit(model)
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        check_whole("every_n_steps", every_n_steps, at_least=1)
        self.every_n_steps = every_n_steps
        self._monitor: StepMonitor | None = None

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Begin. Collective over all ranks."""
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"MuonMonitor measures the steps of one optimizer, and the model has {len(trainer.optimizers)}; make a "
                "lightning_muon.StepMonitor for each of them"
            )
        first_step = trainer.global_step
        self._monitor = StepMonitor(trainer.optimizers[0], every_n_steps=self.every_n_steps, first_step=first_step)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        """Log what the step has given, if it was measured; local."""
        if self._monitor is not None and (values := self._monitor.take()):
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer.global_step - 1)  # As the Trainer counts what it logs.

    def on_train_end(self, *_: Any) -> None:
        """Measure no more."""
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None

    on_exception = on_train_end


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
