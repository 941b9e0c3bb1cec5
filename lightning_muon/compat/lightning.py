"""Every private name of Lightning 2.6 that the package uses; tests/unit/compat/test_frameworks.py fails when one moves.

``lightning.pytorch`` and ``pytorch_lightning`` are the same code under two names, with classes of their own. A
:class:`LightningPackage` stands for one of them, so that everything else is written once.
"""

from __future__ import annotations

import atexit
import importlib
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

PackageName = Literal["lightning.pytorch", "pytorch_lightning"]
# The method of ModelCheckpoint that has the metrics to choose by.
MONITOR_CANDIDATES = "_monitor_candidates"
# Its methods that say whether there is nothing new to save, and that save one of ``save_top_k``, or the last one.
SKIPS_SAVING, SAVE_TOP_K = "_should_skip_saving_checkpoint", "_save_topk_checkpoint"
SAVE_LAST = "_save_last_checkpoint"
_FABRIC = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


@dataclass(frozen=True)
class LightningPackage:
    """One of the two packages of Lightning; importing its modules waits until they are needed."""

    name: PackageName

    def module(self, path: str = "") -> ModuleType:
        """A module of the package, for example ``module("callbacks")``."""
        return importlib.import_module(f"{self.name}.{path}" if path else self.name)

    def fabric(self, path: str) -> ModuleType:
        """A module of the Fabric that belongs to the package."""
        return importlib.import_module(f"{_FABRIC[self.name]}.{path}")


def start_process_group(strategy: Any, package: LightningPackage, store: dist.Store | None) -> None:
    """Start the default process group, on any ``store`` given; set ranks and device. Collective over all ranks."""
    if store is not None:
        device, backend = strategy.root_device, strategy._get_process_group_backend()
        dist.init_process_group(
            backend,
            store=store,
            rank=strategy.cluster_environment.global_rank(),
            world_size=strategy.cluster_environment.world_size(),
            timeout=strategy._timeout,
            device_id=None if device.type == "cpu" else device,
        )
        if backend == "nccl":  # As Lightning does where it starts the group.
            atexit.register(package.fabric("utilities.distributed")._destroy_dist_connection)
    strategy._setup_distributed()


def set_device_mesh(strategy: Any, mesh: DeviceMesh) -> None:
    """Make ``mesh`` what ``strategy.device_mesh`` and ``LightningModule.device_mesh`` return."""
    strategy._device_mesh = mesh
    strategy.lightning_module._device_mesh = mesh


def apply_layer_sync(strategy: Any, module: nn.Module) -> None:
    """Convert batch norms as ``Trainer(sync_batchnorm=True)`` asks; ``ModelParallelStrategy`` ignores it."""
    if strategy._layer_sync is not None:
        strategy._layer_sync.apply(module)


def metadata_filename(package: LightningPackage) -> str:
    """File in the directory of a sharded checkpoint that holds all but tensors."""
    return package.fabric("utilities.load")._METADATA_FILENAME


def is_placeholder_optimizer(package: LightningPackage, optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``configure_optimizers`` returned ``None`` and Lightning put a stand-in there."""
    return isinstance(optimizer, package.module("core.optimizer")._MockOptimizer)


def set_no_backward_sync(strategy: Any, no_sync: Callable[[nn.Module], AbstractContextManager[None]]) -> None:
    """Make ``no_sync`` what ``fabric.no_backward_sync(model)`` enters, with what ``setup_module`` has returned."""

    def no_backward_sync(module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return no_sync(module) if enabled else nullcontext()

    strategy._backward_sync_control = SimpleNamespace(no_backward_sync=no_backward_sync)


def signal_handlers(package: LightningPackage) -> dict[int, Callable[[int, Any], Any]]:
    """The handlers of signals that a running Trainer has installed, by the number of the signal."""
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in signal.valid_signals()}
    kind = package.module("trainer.connectors.signal_connector")._HandlersCompose
    return {number: handler for number, handler in handlers.items() if isinstance(handler, kind)}


def set_sampler_epoch(package: LightningPackage, dataloader: Any, epoch: int) -> None:
    """Tell the sampler of a data loader, where it asks, which epoch it draws next."""
    package.fabric("utilities.data")._set_sampler_epoch(dataloader, epoch)


def begin_in_epoch(loops: dict[str, Any], epoch: int, *, by_steps: bool) -> int:
    """Make the saved progress of a fit that of a run whose next batch is of ``epoch``; return the batches read of it.

    A run that stopped in mid-epoch counts that epoch as ended; one that began at the end of an epoch counts one too few
    as begun. With ``max_steps`` (``by_steps``) Lightning 2.6 takes a checkpoint from behind the end of an epoch for one
    in the middle: it trains with one batch more, and then begins the next epoch (``FitLoop.restarting``). So it becomes
    one from before the hooks of the end of the epoch. Local.
    """
    batches, epochs = loops["epoch_loop.batch_progress"], loops["epoch_progress"]
    num_ended, is_last = epochs["current"]["processed"], batches["is_last_batch"]
    is_cut = not is_last and num_ended > epoch
    for counts in epochs.values() if is_last or is_cut else ():
        counts |= dict.fromkeys(("ready", "started"), epoch + is_cut)
    if is_cut or (is_last and by_steps and num_ended == epoch):
        for counts in epochs.values():
            counts |= dict.fromkeys(("processed", "completed"), counts["ready"] - 1)
        for counts in map(batches.get, ("total", "current")):
            counts["completed"] = counts["processed"] - 1
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
    return 0 if is_last else batches["current"]["processed"]


def set_batches_read(trainer: Any, number: int) -> None:
    """Make this the number of batches that a resumed fit has read of its epoch, before it begins; local."""
    loop, window = trainer.fit_loop.epoch_loop, trainer.accumulate_grad_batches
    current = loop.batch_progress.current
    is_ending = current.processed - current.completed  # 1 in on_train_batch_end.
    loop._batches_that_stepped -= bool(current.ready % window) and not number % window  # Lightning adds 1 there.
    current.ready = current.started = current.processed = number
    current.completed = number - is_ending


def num_accumulated(trainer: Any) -> int:
    """Micro-batches that are over since the last step of a fit; local."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return 0 if progress.is_last_batch else progress.current.processed % trainer.accumulate_grad_batches
