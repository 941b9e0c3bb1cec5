"""The part of the strategy that writes and reads checkpoints."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from lightning_muon.checkpoint.loading import Checkpoint
from lightning_muon.checkpoint.nodes import NodeWeights, copied, of_first_node
from lightning_muon.checkpoint.saving import full_weights, numbered_optimizer_state, write_checkpoint
from lightning_muon.checkpoint.staging import discard, last_written
from lightning_muon.comm.agreement import together
from lightning_muon.compat.lightning import LightningPackage, is_placeholder_optimizer, metadata_filename
from lightning_muon.compat.torch import default_store
from lightning_muon.sharding.weights import broadcast_buffers

_SECONDS_TO_FAIL_TOGETHER = 20.0


class CheckpointStrategy:
    """Reads checkpoints in two stages, so that Lightning's order of restoring is that of its unsharded strategies.

    Lightning offers to restore before :meth:`setup` or after it. Before it, callbacks get their state in time
    (BaseFinetuning needs it in ``on_fit_start``) and ``weights_only`` is passed on, which 2.6 forgets after it. So the
    file is opened before, and weights and optimizer states follow once they have a place to go.
    """

    package: LightningPackage
    lightning_module: Any

    def __init__(self, *, save_distributed_checkpoint: bool, **kwargs: Any) -> None:
        self._is_sharded_checkpoint = save_distributed_checkpoint
        self._checkpoint: Checkpoint | None = None
        self._node_weights = NodeWeights()
        self._has_pending_weights = False
        self._ready_module: weakref.ref[nn.Module] | None = None
        super().__init__(save_distributed_checkpoint=save_distributed_checkpoint, **kwargs)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """The first stage comes before it; see the class."""
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Lightning calls :meth:`load_optimizer_state_dict` after ``on_fit_start``."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Weights: shards, or on rank 0 all of them. Collective over all ranks; every rank must call it."""
        _require_all_ranks(self.lightning_module.trainer)
        module: nn.Module = self.lightning_module
        broadcast_buffers(module)
        with self._node_weights.common(self._training_optimizers()) as differ:
            if not self._is_sharded_checkpoint:
                return copied(full_weights(module)) if differ else full_weights(module)
            state = get_model_state_dict(module, options=self._state_dict_options())
            return of_first_node(state, self._mesh()) if differ else state  # type: ignore[attr-defined]

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """State by name in shards, or by number on rank 0. Collective over all ranks; every rank must call it."""
        plain = getattr(optimizer, "optimizer", optimizer)  # Lightning wraps optimizers.
        if is_placeholder_optimizer(self.package, plain):
            return {}
        with self._node_weights.own():
            state = get_optimizer_state_dict(self.lightning_module, plain, options=self._state_dict_options())
        if self._is_sharded_checkpoint or not state:
            return state
        return numbered_optimizer_state(state, self.lightning_module, plain)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write shards or one file in the place of what is there. Collective over all ranks; every rank must call it.

        A plugin of the user that writes single files (a ``CheckpointIO``) is left to do it in its own way.
        """
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} has no CheckpointIO that could take storage_options")
        stock_io = self.package.fabric("plugins").TorchCheckpointIO
        if not self._is_sharded_checkpoint and type(self.checkpoint_io) is not stock_io:  # type: ignore[attr-defined]
            super().save_checkpoint(checkpoint, filepath)  # type: ignore[misc]
            return
        path = Path(self.broadcast(filepath))  # type: ignore[attr-defined]
        if not self._is_sharded_checkpoint:
            write_checkpoint(path, {}, checkpoint, metadata_name=None)
            return
        states = checkpoint.get("optimizer_states", [])
        content = {f"optimizer_{index}": state for index, state in enumerate(states)}
        content["state_dict"] = checkpoint["state_dict"]
        rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        write_checkpoint(path, content, rest, metadata_name=metadata_filename(self.package))

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint at once: what was left half removed would be the youngest one; local, done by rank 0."""
        if self.is_global_zero:  # type: ignore[attr-defined]
            discard(Path(filepath))

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Open a checkpoint; everything but tensors. Collective over all ranks; every rank must call it."""
        path = Path(self.broadcast(last_written(Path(checkpoint_path))))  # type: ignore[attr-defined]
        name = metadata_filename(self.package)
        self._checkpoint = together(lambda: Checkpoint(path, metadata_name=name, weights_only=weights_only))
        return self._checkpoint.content

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights once the model is sharded: now or in :meth:`setup`."""
        assert self._checkpoint is not None
        self._checkpoint.weights = checkpoint.get("state_dict", {})
        self._checkpoint.strict = strict
        self._has_pending_weights = True
        if self._ready_module is not None and self._ready_module() is self.lightning_module:
            self.load_pending_weights()

    def load_pending_weights(self) -> None:
        """Note that the model is sharded, and load the weights of the checkpoint if there is one.

        Collective over all ranks; every rank must call it.
        """
        self._ready_module = weakref.ref(self.lightning_module)
        if self._has_pending_weights:
            assert self._checkpoint is not None
            self._node_weights.forget()
            self._checkpoint.load_weights(self.lightning_module)
            self._has_pending_weights = False

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of all optimizers. Collective over all ranks; every rank must call it."""
        assert self._checkpoint is not None
        states, optimizers = checkpoint["optimizer_states"], self.optimizers  # type: ignore[attr-defined]
        if len(states) != len(optimizers):
            raise ValueError(
                f"{self._checkpoint.path} has the states of {len(states)} optimizers, but configure_optimizers "
                f"returned {len(optimizers)}"
            )
        for index, optimizer in enumerate(optimizers):
            if not is_placeholder_optimizer(self.package, optimizer):
                self._checkpoint.load_optimizer(self.lightning_module, optimizer, index)
        self._checkpoint = None

    def _training_optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that know more of the weights than the module does: none if a ``validate`` came after their ``fit``."""
        return self.optimizers if self.lightning_module.trainer.state.fn == "fit" else []  # type: ignore[attr-defined]

    def _state_dict_options(self) -> StateDictOptions:
        return StateDictOptions(full_state_dict=not self._is_sharded_checkpoint, cpu_offload=True)


def _require_all_ranks(trainer: Any) -> None:
    """Raise unless all ranks are about to save the same checkpoint, where an exception has brought this rank here.

    ``OnExceptionCheckpoint`` saves from the handler of an exception. If only one rank has failed, the others never
    come, and the first collective would hang until it times out.
    """
    if trainer.state.status != "interrupted" or dist.get_world_size() == 1:
        return
    store, key = default_store(), f"lightning_muon/interrupted/{trainer.global_step}"
    num_ranks, deadline = store.add(key, 1), time.monotonic() + _SECONDS_TO_FAIL_TOGETHER
    while num_ranks < dist.get_world_size() and time.monotonic() < deadline:
        time.sleep(0.05)
        num_ranks = store.add(key, 0)
    if num_ranks < dist.get_world_size():
        raise RuntimeError(
            f"no checkpoint is saved after the exception: it needs the shards of all {dist.get_world_size()} ranks, "
            f"but only {num_ranks} failed within {_SECONDS_TO_FAIL_TOGETHER:g} s; resume from the last one of "
            "ModelCheckpoint"
        )
