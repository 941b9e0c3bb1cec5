"""What of a Trainer must be adapted to shards: callbacks of the user, the default optimizer, precision plugins."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from lightning_utilities.core.overrides import is_overridden
from torch import Tensor, nn

from lightning_muon.compat.lightning import LightningPackage
from lightning_muon.config import MuonConfig
from lightning_muon.engine.model_setup import require_precision
from lightning_muon.engine.options import Options
from lightning_muon.engine.training import TrainingEngine
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.optimizer import FlexDeMo
from lightning_muon.integrations.lightning.first_callback import AT_ENDS
from lightning_muon.optim.parallel_muon import ParallelMuon
from lightning_muon.optim.planned_optimizer import PlannedOptimizer
from lightning_muon.params.layout import parameters_of
from lightning_muon.sharding.modes import MODES

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
    is_foreign = type(callback).__module__.split(".")[0] != package.name.split(".")[0]
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
        """Clip by one norm, and log it. Collective over the meshes of the parameters."""
        assert self.engine is not None, "the strategy's setup comes first"
        norm = self.engine.clip_by_norm(parameters_of(optimizer), clip_val)
        self.engine.module.log("grad_norm", norm)  # type: ignore[operator]

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
