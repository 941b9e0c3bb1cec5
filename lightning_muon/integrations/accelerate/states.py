"""The part of an Accelerator that saves and loads states, and hands out whole weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import StateDictType

from lightning_muon.comm.agreement import fail_together
from lightning_muon.compat.accelerate import in_place_of_states
from lightning_muon.integrations.accelerate.parts import load_parts, save_parts
from lightning_muon.integrations.accelerate.preparation import mesh_of
from lightning_muon.integrations.accelerate.training import PreparedTraining
from lightning_muon.integrations.mesh import Meshes
from lightning_muon.integrations.options import Options
from lightning_muon.integrations.state_checkpoint import weights_to_save
from lightning_muon.sharding.runtime import free_unsharded


class SavesStates:
    """Lets Accelerate save schedulers, random states, data loaders and registered objects, and does the rest."""

    options: Options
    # Of the class beside it.
    state: Any
    step: int
    _meshes: Meshes | None
    _training: PreparedTraining | None

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> Any:
        """As in Accelerate; what it returns, too. Collective over all ranks; every rank must call it.

        Weights and states of optimizers are written as Accelerate does it for FSDP2: directories with the shards of
        each rank, or with ``fsdp_state_dict_type: FULL_STATE_DICT`` (or ``save_distributed_checkpoint=False``) a file
        for each.
        """
        stock, training = super().save_state, self._training  # type: ignore[misc]
        if training is None:
            return stock(output_dir, safe_serialization, **kwargs)

        def save(directory: str) -> None:
            self._prepare_for_reading(training)
            optimizers = training.optimizers
            save_parts(Path(directory), training.module, optimizers, self._mesh(), whole=self._saves_whole())

        error, result = None, None
        try:
            with in_place_of_states(self, "save", save):
                result = stock(output_dir, safe_serialization, **kwargs)
        except Exception as problem:  # Objects of the user write themselves.
            error = problem
        fail_together(error, None)
        return result

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """As in Accelerate; the number of ranks, and what divides the model, may have changed since.

        Collective over all ranks; every rank must call it.
        """
        stock, training = super().load_state, self._training  # type: ignore[misc]
        if training is None:
            stock(input_dir, load_kwargs, **load_model_func_kwargs)
            return
        missing = input_dir is not None and not Path(input_dir).expanduser().is_dir()
        fail_together(FileNotFoundError(f"there is no directory {input_dir}") if missing else None, None)

        def load(directory: str) -> None:
            self._prepare_for_reading(training)
            load_parts(Path(directory), training.module, training.optimizers)
            training.weights_have_changed()

        error = None
        try:
            with in_place_of_states(self, "load", load):
                stock(input_dir, load_kwargs, **load_model_func_kwargs)
        except Exception as problem:  # Objects of the user load themselves.
            error = problem
        fail_together(error, None)
        # It is in a file of each rank, which new ranks do not have; all must be at the same micro-batch.
        step = [self.step]
        dist.broadcast_object_list(step, src=0)
        self.step = step[0]

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Whole weights on the CPU on rank 0, an empty dict elsewhere; as in Accelerate where weights are whole anyway.

        Collective over all ranks; every rank must call it.
        """
        training = self._training
        if training is None or self.unwrap_model(model, keep_torch_compile=False) is not training.module:  # type: ignore[attr-defined]
            return super().get_state_dict(model, unwrap)  # type: ignore[misc]
        self._prepare_for_reading(training)
        if not training.mode.divides_weights:
            return super().get_state_dict(model, unwrap)  # type: ignore[misc]
        return weights_to_save(training.module, training.optimizers, self._mesh(), whole=True)

    def _prepare_for_reading(self, training: PreparedTraining) -> None:
        """Weights have their new values, and are shards; local."""
        training.mode.finish_parameters()
        # An evaluation leaves the root whole.
        free_unsharded(training.module)

    def _saves_whole(self) -> bool:
        plugin = getattr(self.state, "fsdp_plugin", None)
        of_accelerate = plugin is not None and plugin.state_dict_type == StateDictType.FULL_STATE_DICT
        return of_accelerate or not self.options.save_distributed_checkpoint

    def _mesh(self) -> Any:
        assert self._meshes is not None, "prepare comes first"
        return mesh_of(self._meshes, self.options)
