"""The callback before all others: signals that all ranks answer, comparisons of the ranks, weights on their way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from lightning_muon.comm.agreement import missing_at
from lightning_muon.compat.lightning import MONITOR_CANDIDATES, SAVE_LAST, LightningPackage, signal_handlers
from lightning_muon.compat.torch import default_store
from lightning_muon.monitor.signals import SharedSignals

# Lightning calls these where a step may have been the last one for a while.
AT_ENDS = (
    *("on_train_epoch_start", "on_train_epoch_end", "on_validation_start", "on_validation_epoch_start"),
    *("on_train_end", "on_fit_end"),
)
_SECONDS_TO_FAIL_TOGETHER = 10.0
_SETTINGS = (
    *("max_steps", "max_epochs", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"),
    "check_val_every_n_epoch",
)


class FirstCallback:
    """Comes before all other callbacks: the weights are there wherever a step may have been the last one for a while.

    At the start of the training, and at both ends of its epochs, the ranks compare their runs. From its first hook on
    they run Lightning's handlers of signals together, between two batches. After SIGTERM or Ctrl-C they save, and end
    with the exit code of a process that the signal ends. Other ranks are told of an exception before callbacks of the
    user answer it, which may communicate. Its base classes are this one, and the ``Callback`` of one Lightning package.
    """

    package: LightningPackage

    def __init__(self) -> None:
        self._signals: SharedSignals | None = None
        self._received = signal.SIGTERM

    # Lightning has installed its handlers of signals before the first of these.
    def on_sanity_check_start(self, *_: Any) -> None:  # noqa: D102
        handlers = signal_handlers(self.package)
        if self._signals is not None or not handlers or not dist.is_initialized():
            return
        if signal.SIGTERM in handlers and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            handlers[signal.SIGINT] = partial(self._interrupt, handlers[signal.SIGTERM])
        self._signals = SharedSignals(handlers)

    on_test_start = on_predict_start = on_sanity_check_start

    def _interrupt(self, end: Callable[[int, Any], Any], _: int, frame: Any) -> None:
        self._received = signal.SIGINT
        end(signal.SIGTERM, frame)

    def on_train_start(self, trainer: Any, *_: Any) -> None:  # noqa: D102
        self.on_sanity_check_start()
        _compare(trainer)

    def on_validation_start(self, trainer: Any, *_: Any) -> None:  # noqa: D102
        self.on_sanity_check_start()
        trainer.strategy.finish_parameters()

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:  # noqa: D102
        trainer.strategy.finish_parameters()
        _compare(trainer)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:  # noqa: D102
        self.on_train_epoch_start(trainer)
        self._answer()  # For a signal that came during the last validation of an epoch.

    def on_train_end(self, trainer: Any, *_: Any) -> None:  # noqa: D102
        trainer.strategy.finish_parameters()

    on_validation_epoch_start = on_fit_end = on_train_end

    def on_before_optimizer_step(self, *_: Any) -> None:  # noqa: D102
        if self._signals is not None:
            self._signals.tell()

    def on_train_batch_end(self, *_: Any) -> None:  # noqa: D102
        # Behind a step: gradients of an accumulated batch are in no checkpoint.
        if self._signals is not None:
            self._signals.answer()

    def _answer(self, *_: Any) -> None:
        self.on_before_optimizer_step()
        self.on_train_batch_end()

    on_test_end = on_predict_end = _answer

    def on_exception(self, trainer: Any, _: Any, exception: Any) -> None:  # noqa: D102
        _ignore_sigterm()
        # Raised on all ranks together.
        if isinstance(exception, self.package.module("utilities.exceptions").SIGTERMException):
            exception.code = 128 + self._received
            save_last(trainer, self.package)
        else:
            trainer.strategy.on_exception(exception)


def save_last(trainer: Any, package: LightningPackage) -> None:
    """Save what ``ckpt_path="last"`` goes on from by the first ``ModelCheckpoint``, unless callbacks do it themselves.

    Collective over all ranks, after the same batch.
    """
    known = package.module("callbacks")
    if trainer.state.fn != "fit" or trainer.sanity_checking or trainer.fast_dev_run:
        return
    if any(isinstance(each, known.OnExceptionCheckpoint) for each in trainer.checkpoint_callbacks):
        return
    saving = [each for each in trainer.checkpoint_callbacks if isinstance(each, known.ModelCheckpoint)]
    if not saving or any(each.save_on_exception for each in saving) or saving[0].save_weights_only:
        return
    saving[0].save_last = True
    getattr(saving[0], SAVE_LAST)(trainer, getattr(saving[0], MONITOR_CANDIDATES)(trainer))


def require_all_ranks(trainer: Any) -> None:
    """Raise if a callback saves after an exception on this rank, and not on all: the first collective would hang."""
    if trainer.state.status != "interrupted" or dist.get_world_size() == 1:
        return
    store, num_ranks = default_store(), dist.get_world_size()
    keys = [f"lightning_muon/interrupted/{trainer.global_step}/{rank}" for rank in range(num_ranks)]
    store.set(keys[dist.get_rank()], "")
    num_failed = num_ranks - len(missing_at(store, keys, _SECONDS_TO_FAIL_TOGETHER))
    if num_failed < num_ranks:
        raise RuntimeError(
            f"no checkpoint is saved after the exception: it needs the shards of all {num_ranks} ranks, "
            f"but only {num_failed} failed within {_SECONDS_TO_FAIL_TOGETHER:g} s; resume from an earlier one"
        )


def _ignore_sigterm(*_: Any) -> None:
    """Ignore SIGTERM after an error, which Lightning's handler of the signal, with its broadcast, would hide.

    Launchers send SIGTERM to the ranks that are left when one has failed, where the communication is broken: the
    broadcast would raise in the middle of clearing up, in place of the error that says what has happened.
    """
    if callable(signal.getsignal(signal.SIGTERM)) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _compare(trainer: Any) -> None:
    """Raise unless the ranks have the same run at the start, and at the end of an epoch. Collective over all ranks."""
    loop = trainer.fit_loop.epoch_loop
    num_batches = trainer.num_training_batches
    if trainer.max_steps > 0:  # The batches beyond are not reached.
        left = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
        num_batches = min(num_batches, loop.batch_progress.current.ready + left)
    settings = [(name, str(getattr(trainer, name))) for name in _SETTINGS]
    progress = {
        "batches of the epoch": num_batches,
        "steps so far": trainer.global_step,
        "batches so far": loop.batch_progress.current.ready,
        "batches until the validation": trainer.val_check_batch,
    }
    lines = [*settings, *((name, str(value)) for name, value in progress.items())]
    trainer.precision_plugin.engine.require_equal(lines, "the run of the Trainer")
