"""What of a Trainer must be adapted to shards: callbacks of the user, the default optimizer, precision plugins.

A callback before all others compares the ranks, and lets all of them answer signals.
"""

from __future__ import annotations

import copy
import inspect
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.overrides import is_overridden
from torch import Tensor, nn

from lightning_muon.compat.lightning import MONITOR_CANDIDATES, SAVE_LAST, LightningPackage, signal_handlers
from lightning_muon.config import MuonConfig
from lightning_muon.engine.model_setup import require_precision
from lightning_muon.engine.options import Options
from lightning_muon.engine.training import TrainingEngine
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.optimizer import FlexDeMo
from lightning_muon.monitor.signals import SharedSignals
from lightning_muon.optim.parallel_muon import ParallelMuon, PlannedOptimizer
from lightning_muon.params.layout import parameters_of
from lightning_muon.sharding.modes import MODES

# Lightning calls these where a step may have been the last one for a while.
AT_ENDS = (
    *("on_train_epoch_start", "on_train_epoch_end", "on_validation_start", "on_validation_epoch_start"),
    *("on_train_end", "on_fit_end"),
)
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


_AVERAGES = "averages whole weights; use lightning_muon.EMAWeights, which averages the shards of each rank"
# Callback class -> why not with shards, and what to use in its place.
_REFUSED = {
    "StochasticWeightAveraging": _AVERAGES,
    "WeightAveraging": _AVERAGES,
    "ModelPruning": "puts masks on whole weights; prune the module that load_from_checkpoint returns",
}


def check_run(module: Any, options: Options, package: LightningPackage) -> None:
    """Raise ``ValueError`` for a LightningModule, or a callback of its Trainer, that does not go with the options."""
    if options.loss_scaling == "tokens" and not module.automatic_optimization:
        raise ValueError(
            "loss_scaling='tokens' needs automatic optimization; divide the loss by the number of tokens yourself"
        )
    if options.pipeline_size > 1:
        if not module.automatic_optimization:
            raise ValueError("a pipeline runs forward and backward itself; set automatic_optimization = True")
        require_single_batches(module.trainer)
    known = package.module("callbacks")
    if options.async_save:
        _check_async_save(module.trainer, package)
    # torch.equal of sharded tensors, by which they find what an optimizer has, is collective over all ranks.
    finetuning = [c for c in module.trainer.callbacks if isinstance(c, known.BaseFinetuning)]
    if options.pipeline_size > 1 and finetuning:
        raise ValueError(
            f"the callback {type(finetuning[0]).__name__} does not work with pipeline_size={options.pipeline_size}: "
            "give the optimizer all parameters, and freeze and unfreeze them with requires_grad_ in setup and "
            "on_train_epoch_start of a Callback"
        )
    for callback in module.trainer.callbacks if MODES[options.sharding].shards_weights else ():
        for name, reason in _REFUSED.items():
            if isinstance(callback, getattr(known, name, ())):
                raise ValueError(f"the callback {type(callback).__name__} does not work with shards: it {reason}")


def _check_async_save(trainer: Any, package: LightningPackage) -> None:
    saving = [
        each for each in trainer.checkpoint_callbacks if isinstance(each, package.module("callbacks").ModelCheckpoint)
    ]
    if any(each.save_last == "link" for each in saving):
        raise ValueError(
            "ModelCheckpoint(save_last='link') does not go with async_save=True: the link would be there before the "
            "checkpoint is written; use AutoResume, or save_last=True"
        )
    plugin = type(trainer.strategy.checkpoint_io)
    if plugin is not package.fabric("plugins").TorchCheckpointIO:
        raise ValueError(f"async_save=True does not go with {plugin.__name__}, which writes by itself; remove one")


def require_own_files(trainer: Any, package: LightningPackage) -> None:
    """Raise ``ValueError`` if two ``ModelCheckpoint`` would write one file; local, on all ranks, after their ``setup``.

    Without ``async_save`` the second one sees the file of the first, and gives its own a version.
    """
    owners: dict[str, Any] = {}
    for each in trainer.checkpoint_callbacks:
        if not isinstance(each, package.module("callbacks").ModelCheckpoint):
            continue
        names = [each.format_checkpoint_name({})] if each.save_top_k != 0 else []
        names += [each.format_checkpoint_name({}, each.CHECKPOINT_NAME_LAST)] if each.save_last else []
        for name in names:
            if owners.setdefault(name, each) is not each:
                raise ValueError(
                    f"{type(owners[name]).__name__} and {type(each).__name__} both write such files as {name}; with "
                    "async_save=True the second cannot see that of the first, which is not there yet. Give one of them "
                    "another filename or dirpath (for save_last: another dirpath, or CHECKPOINT_NAME_LAST)"
                )


def require_single_batches(trainer: Any) -> None:
    """Raise ``ValueError`` where batches are accumulated, from the start on or by a callback; local, on all ranks."""
    micro_batches = trainer.accumulate_grad_batches
    if micro_batches != 1:
        raise ValueError(
            f"a pipeline has micro-batches of its own; instead of accumulate_grad_batches={micro_batches} take a "
            "batch that is so many times larger, and pipeline_microbatches"
        )


# Lightning calls these between a step and the next forward pass.
_BETWEEN_STEPS = ("on_before_zero_grad", "on_train_batch_end", "on_train_batch_start")
_WITH_GRADIENTS = ("on_after_backward", "on_before_optimizer_step")


def reads_weights_between_steps(trainer: Any, options: Options, package: LightningPackage) -> bool:
    """Whether new weights must be there when a step returns, because a hook of the user after it may read them."""
    module, config = trainer.lightning_module, options.config
    hides_nothing = isinstance(config, FlexDeMoConfig) or config.overlap == "off"
    if hides_nothing or not module.automatic_optimization:
        return True
    known = package.module("callbacks")
    averaging = tuple(getattr(known, name) for name in _REFUSED if hasattr(known, name))
    suspects = [c for c in trainer.callbacks if isinstance(c, averaging) or _is_of_user(c, package)]
    places = [(each, hook) for each in (module, *suspects) for hook in _BETWEEN_STEPS]
    places += [(module, hook) for hook in ("optimizer_step", "lr_scheduler_step")]
    return any(_overrides(each, hook) for each, hook in places)


def gradient_readers(trainer: Any, package: LightningPackage) -> list[str]:
    """The hooks of the module and of the user's callbacks that look for gradients."""
    hooked = (trainer.lightning_module, *(c for c in trainer.callbacks if _is_of_user(c, package)))
    return [f"{type(each).__name__}.{hook}" for each in hooked for hook in _WITH_GRADIENTS if _overrides(each, hook)]


def _is_of_user(callback: Any, package: LightningPackage) -> bool:
    """Whether code of the user runs in it; ``LambdaCallback`` has its hooks as attributes."""
    is_foreign = type(callback).__module__.split(".")[0] not in (package.name.split(".")[0], "lightning_muon")
    return is_foreign or any(hook in vars(callback) for hook in (*_BETWEEN_STEPS, *AT_ENDS, *_WITH_GRADIENTS))


def _overrides(hooked: Any, name: str) -> bool:
    """Whether a method is more than the one of Lightning's base classes."""
    defined_in = inspect.unwrap(getattr(type(hooked), name)).__qualname__.split(".")[0]
    return defined_in not in ("Callback", "ModelHooks", "LightningModule") or name in vars(hooked)


def provide_default_optimizer(module: Any, config: MuonConfig | FlexDeMoConfig, package: LightningPackage) -> None:
    """Give a LightningModule without ``configure_optimizers``, which Lightning refuses, one with our optimizer."""
    if is_overridden("configure_optimizers", module, package.module().LightningModule):
        return

    def configure_optimizers(self: nn.Module) -> PlannedOptimizer:
        kind = FlexDeMo if isinstance(config, FlexDeMoConfig) else ParallelMuon
        return kind.from_config(self, config)  # type: ignore[arg-type]

    configure_optimizers.is_default = True
    module.configure_optimizers = MethodType(configure_optimizers, module)


def has_default_optimizer(module: Any) -> bool:
    """Whether ``configure_optimizers`` is that of :func:`provide_default_optimizer`."""
    return getattr(vars(module).get("configure_optimizers"), "is_default", False)


class EnginePlugin:
    """The part of a precision plugin that deals with forward passes and gradients: the engine of the run does it."""

    engine: TrainingEngine | None = None

    @contextmanager
    def forward_context(self) -> Generator[None]:
        """Enter it around each of the user's steps."""
        with nullcontext() if self.engine is None else self.engine.around_forward(), super().forward_context():  # type: ignore[misc]
            yield

    def compute_context(self) -> AbstractContextManager[None]:
        """The context of Lightning's plugin for forward passes: autocast, a default dtype; local."""
        return super().forward_context()  # type: ignore[misc]

    def post_backward(self, tensor: Tensor, module: Any) -> Any:
        """Gradients are whole before ``on_after_backward``. Collective over all ranks in the last micro-batch."""
        if self.engine is not None:
            self.engine.finish_backward()
        return super().post_backward(tensor, module)  # type: ignore[misc]

    def clip_grad_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Clip by one norm, and log it unless code of the user clips. Collective over the meshes of the parameters."""
        assert self.engine is not None, "the strategy's setup comes first"
        norm, module = self.engine.clip_by_norm(parameters_of(optimizer), clip_val), self.engine.module
        # Lightning refuses two logs of one name in one hook.
        if module.automatic_optimization and not _overrides(module, "configure_gradient_clipping"):
            module.log("grad_norm", norm)  # type: ignore[operator]

    def clip_grad_by_value(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Clip element by element."""
        assert self.engine is not None, "the strategy's setup comes first"
        self.engine.clip_by_value(parameters_of(optimizer), clip_val)


def sharded_plugin(plugin: Any, package: LightningPackage) -> Any:
    """The counterpart of Lightning's precision ``plugin`` whose gradients are the engine's business, or an error."""
    if isinstance(plugin, EnginePlugin):
        return plugin
    plugins, kind = package.module("plugins.precision"), type(plugin)
    precision = str(getattr(plugin, "precision", kind.__name__))
    is_known = kind in (plugins.Precision, plugins.MixedPrecision, plugins.HalfPrecision)
    said = f"Trainer(precision={precision!r}) by {kind.__name__}"
    require_precision(precision if is_known else kind.__name__, said)
    # A subclass, so that Lightning's checks by class (ThroughputMonitor) go on working.
    ours = copy.copy(plugin)
    ours.__class__ = type(f"Sharded{kind.__name__}", (EnginePlugin, kind), {})
    return ours
