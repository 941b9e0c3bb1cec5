"""What of a Trainer must be adapted to shards: callbacks, the default optimizer, inference mode, SIGTERM."""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from types import MethodType
from typing import Any

from lightning_utilities.core.overrides import is_overridden
from torch import nn

from lightning_muon.compat.lightning import LightningPackage
from lightning_muon.config import MuonConfig
from lightning_muon.engine.options import Options
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.optimizer import FlexDeMo
from lightning_muon.optim.parallel_muon import ParallelMuon
from lightning_muon.optim.planned_optimizer import PlannedOptimizer
from lightning_muon.sharding.modes import MODES

_AVERAGE_INSTEAD = (
    "save checkpoints with ModelCheckpoint and ParallelMuonStrategy(save_distributed_checkpoint=False), and average "
    "their 'state_dict' entries after the training"
)
# Callback class -> (why, what to use in its place)
_REFUSED = {
    "StochasticWeightAveraging": ("it copies whole weights and averages them with shards", _AVERAGE_INSTEAD),
    "WeightAveraging": ("it copies whole weights and averages them with shards", _AVERAGE_INSTEAD),
    "ModelPruning": (
        "it puts masks on whole weights",
        "prune after the training, on the module that load_from_checkpoint returns",
    ),
}


def check_run(module: Any, options: Options, package: LightningPackage) -> None:
    """Raise ``ValueError`` for a LightningModule, or callbacks of its Trainer, that do not go with the options."""
    if MODES[options.sharding].shards_weights:
        refuse_callbacks(module.trainer.callbacks, package)
    if options.loss_scaling == "tokens" and not module.automatic_optimization:
        raise ValueError(
            "loss_scaling='tokens' needs automatic optimization, where it is known which micro-batches make a "
            "step; with manual optimization divide the loss by the number of tokens yourself"
        )


def refuse_callbacks(callbacks: Iterable[Any], package: LightningPackage) -> None:
    """Raise ``ValueError`` for the first callback that would fail, or be wrong, on sharded weights."""
    known = package.module("callbacks")
    for callback in callbacks:
        for name, (reason, instead) in _REFUSED.items():
            if isinstance(callback, getattr(known, name, ())):
                raise ValueError(
                    f"the callback {type(callback).__name__} does not work with ParallelMuonStrategy: "
                    f"{reason}. Instead, {instead}; or use another strategy."
                )


# Lightning calls these between a step and the next forward pass.
_BETWEEN_STEPS = ("on_before_zero_grad", "on_train_batch_end", "on_train_batch_start")
# And these where a step may have been the last one for a while.
_AT_ENDS = (
    *("on_train_epoch_start", "on_train_epoch_end", "on_validation_start", "on_validation_epoch_start"),
    *("on_train_end", "on_fit_end"),
)
_WITH_GRADIENTS = ("on_after_backward", "on_before_optimizer_step")


def reads_weights_between_steps(trainer: Any, options: Options, package: LightningPackage) -> bool:
    """Whether new weights must be there when an optimizer step returns.

    So it is with manual optimization, and if code runs between two steps that may read weights other than through
    ``state_dict``. The module and every callback count that override one of the hooks there. Lightning's own callbacks
    read none, but for those that average weights.
    """
    if options.config.overlap in ("step", "off") or not trainer.lightning_module.automatic_optimization:
        return True
    known = package.module("callbacks")
    averaging = tuple(getattr(known, name) for name in _REFUSED if hasattr(known, name))
    suspects = [c for c in trainer.callbacks if isinstance(c, averaging) or _is_of_user(c, package)]
    hooked = (trainer.lightning_module, *suspects)
    return any(_overrides(each, hook) for each in hooked for hook in _BETWEEN_STEPS) or any(
        _overrides(trainer.lightning_module, hook) for hook in ("optimizer_step", "lr_scheduler_step")
    )


def reads_gradients(trainer: Any, package: LightningPackage) -> list[str]:
    """Hooks of the module and of the user's callbacks in which gradients are usually read."""
    hooked = (trainer.lightning_module, *(c for c in trainer.callbacks if _is_of_user(c, package)))
    return [f"{type(each).__name__}.{hook}" for each in hooked for hook in _WITH_GRADIENTS if _overrides(each, hook)]


def wait_before_callbacks(
    trainer: Any, package: LightningPackage, finish: Callable[[], None], warn: Callable[[str], None]
) -> Any:
    """Let hooks at the ends of epochs and of the training find all new weights.

    Args:
        trainer: Its list of callbacks gets another one at its head, which is returned.
        package: Of the Trainer.
        finish: Waits for the weights.
        warn: Takes a warning of hooks that look for gradients, which no rank has.
    """

    def wait(_: Any, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        finish()

    hooks = dict.fromkeys(_AT_ENDS, wait)
    first = type("WeightsHaveArrived", (package.module("callbacks").Callback,), hooks)()
    trainer.callbacks.insert(0, first)
    if readers := reads_gradients(trainer, package):
        sharding = trainer.strategy.options.sharding
        warn(
            f"{', '.join(readers)}: with sharding={sharding!r} no rank has whole gradients, so parameter.grad is None "
            "there, and changing it has no effect; use sharding='ddp' or 'fsdp' if the hook needs gradients"
        )
    return first


def _is_of_user(callback: Any, package: LightningPackage) -> bool:
    """Whether code of the user runs in it; ``LambdaCallback`` has its hooks as attributes."""
    is_foreign = type(callback).__module__.split(".")[0] != package.name.split(".")[0]
    return is_foreign or any(hook in vars(callback) for hook in (*_BETWEEN_STEPS, *_AT_ENDS, *_WITH_GRADIENTS))


def _overrides(hooked: Any, name: str) -> bool:
    """Whether a method is more than the one of Lightning's base classes."""
    defined_in = inspect.unwrap(getattr(type(hooked), name)).__qualname__.split(".")[0]
    return defined_in not in ("Callback", "ModelHooks", "LightningModule") or name in vars(hooked)


def provide_default_optimizer(module: Any, config: MuonConfig | FlexDeMoConfig, package: LightningPackage) -> None:
    """Give a LightningModule without ``configure_optimizers`` one that returns a ParallelMuon, or a FlexDeMo.

    Lightning refuses to train without it, before the strategy is asked for anything else.
    """
    if is_overridden("configure_optimizers", module, package.module().LightningModule):
        return

    def configure_optimizers(self: nn.Module) -> PlannedOptimizer:
        kind = FlexDeMo if isinstance(config, FlexDeMoConfig) else ParallelMuon
        return kind.from_config(self.named_parameters(), config)  # type: ignore[arg-type]

    configure_optimizers.is_default = True
    module.configure_optimizers = MethodType(configure_optimizers, module)


def remove_default_optimizer(module: Any) -> None:
    """Undo :func:`provide_default_optimizer`."""
    if has_default_optimizer(module):
        del module.configure_optimizers


def has_default_optimizer(module: Any) -> bool:
    """Whether ``configure_optimizers`` is that of :func:`provide_default_optimizer`."""
    return getattr(vars(module).get("configure_optimizers"), "is_default", False)


def avoid_inference_mode(trainer: Any) -> None:
    """Evaluate under ``no_grad``.

    FSDP2 keeps the tensors into which it gathers weights. Made in inference mode they could not be used by a later
    training step. Lightning makes the same exception for its FSDPStrategy.
    """
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False


class SigtermHandler:
    """Keeps the handler of SIGTERM from hiding an error.

    Lightning's handler broadcasts. Launchers send SIGTERM to the ranks that are left when one has failed, where the
    communication is broken: the broadcast then raises, in the middle of clearing up, and its error takes the place of
    the one that says what has happened. So from an error on SIGTERM is ignored; the process ends anyway. If the
    program catches the error and trains on, the handler is put back.
    """

    def __init__(self) -> None:
        self._kept: Any = None

    @contextmanager
    def ignored_after_error(self) -> Generator[None]:
        """Enter it around what may raise: puts the handler back, and ignores SIGTERM once the block has raised.

        The end of an iteration is no error.
        """
        self.restore()
        try:
            yield
        except (StopIteration, GeneratorExit):
            raise
        except BaseException:
            self.ignore()
            raise

    def ignore(self) -> None:
        """From now on nothing happens on SIGTERM, if that was a function's business; local, main thread."""
        handler = signal.getsignal(signal.SIGTERM)
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self._kept = handler
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def restore(self) -> None:
        """Put back what :meth:`ignore` has taken away, unless there is another handler now; local, main thread."""
        if self._kept is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == signal.SIG_IGN:
            signal.signal(signal.SIGTERM, self._kept)
        self._kept = None
