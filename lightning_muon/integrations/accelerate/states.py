"""The part of an Accelerator that saves and loads states, and hands out whole weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import StateDictType

from lightning_muon.checkpoint.saving import weights_to_save
from lightning_muon.comm.agreement import fail_together, require_equal
from lightning_muon.compat.accelerate import in_place_of_states, prepared_models
from lightning_muon.engine.mesh_sizes import Meshes
from lightning_muon.engine.options import Options
from lightning_muon.engine.training import TrainingEngine
from lightning_muon.integrations.accelerate.parts import load_parts, save_parts
from lightning_muon.sharding.fsdp_runtime import free_unsharded


class SavesStates:
    """Lets Accelerate save schedulers, random states, data loaders and registered objects, and does the rest."""

    options: Options
    # Of the class beside it.
    state: Any
    step: int
    _meshes: Meshes | None
    _engine: TrainingEngine | None

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> Any:
        """As in Accelerate; what it returns, too. Collective over all ranks; every rank must call it.

        Weights and states of optimizers are written as Accelerate does it for FSDP2: directories with the shards of
        each rank, or with ``fsdp_state_dict_type: FULL_STATE_DICT`` (or ``save_distributed_checkpoint=False``) a file
        for each. Where every rank has whole weights, hooks get them, and the model is written unless rank 0 has taken
        them.
        """
        stock, engine = super().save_state, self._engine  # type: ignore[misc]
        if engine is None:
            return stock(output_dir, safe_serialization, **kwargs)

        def save(directory: str, with_model: bool) -> None:
            chosen = [with_model]
            dist.broadcast_object_list(chosen, src=0)  # Hooks write, and take what they have written, on rank 0 only.
            self._prepare_for_reading(engine)
            options = {"whole": self._saves_whole(), "with_model": chosen[0]}
            save_parts(Path(directory), engine.module, engine.optimizers, engine.mesh, **options)

        def weights() -> Sequence[Any]:
            return () if engine.mode.shards_weights else [self.get_state_dict(engine.module)]

        return self._among_hooks("save", partial(stock, output_dir, safe_serialization, **kwargs), save, weights)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """As in Accelerate; the number of ranks, and what divides the model, may have changed since.

        Where every rank has whole weights, hooks get the model, and one that they take is not loaded.
        Collective over all ranks; every rank must call it.
        """
        stock, engine = super().load_state, self._engine  # type: ignore[misc]
        if engine is None:
            stock(input_dir, load_kwargs, **load_model_func_kwargs)
            return
        missing = input_dir is not None and not Path(input_dir).expanduser().is_dir()
        fail_together(FileNotFoundError(f"there is no directory {input_dir}") if missing else None, None)

        def load(directory: str, with_model: bool) -> None:
            require_equal([("the model", str(with_model))], None, "what hooks of load_state leave to be loaded")
            self._prepare_for_reading(engine)
            load_parts(Path(directory), engine.module, engine.optimizers, with_model=with_model)
            engine.weights_have_changed()

        def models() -> Sequence[Any]:
            return () if engine.mode.shards_weights else prepared_models(self)

        self._among_hooks("load", partial(stock, input_dir, load_kwargs, **load_model_func_kwargs), load, models)
        # It is in a file of each rank, which new ranks do not have; all must be at the same micro-batch.
        step = [self.step]
        dist.broadcast_object_list(step, src=0)
        self.step = step[0]

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Whole weights on the CPU on rank 0, an empty dict elsewhere; as in Accelerate where weights are whole anyway.

        Collective over all ranks; every rank must call it.
        """
        engine = self._engine
        if engine is None or self.unwrap_model(model, keep_torch_compile=False) is not engine.module:  # type: ignore[attr-defined]
            return super().get_state_dict(model, unwrap)  # type: ignore[misc]
        self._prepare_for_reading(engine)
        if not engine.mode.shards_weights:
            return super().get_state_dict(model, unwrap)  # type: ignore[misc]
        return weights_to_save(engine.module, engine.optimizers, engine.mesh, whole=True)

    def _among_hooks(
        self,
        when: Literal["save", "load"],
        stock: Callable[[], Any],
        action: Callable[[str, bool], None],
        offer: Callable[[], Sequence[Any]],
    ) -> Any:
        """Call Accelerate; arguments of :func:`in_place_of_states`. Collective over all ranks; every rank must call it.

        Hooks and objects of the user may fail on any rank, before ``action`` or after it; then all ranks raise.
        """
        is_agreeing = False

        def act(directory: str, with_model: bool) -> None:
            nonlocal is_agreeing
            is_agreeing = True
            fail_together(None, None)  # Ranks that have failed before are in the other one.
            is_agreeing = False
            action(directory, with_model)

        error, result = None, None
        try:
            with in_place_of_states(self, when, act, offer):
                result = stock()
        except Exception as problem:
            if is_agreeing:
                raise
            error = problem
        fail_together(error, None)
        return result

    def _prepare_for_reading(self, engine: TrainingEngine) -> None:
        """Weights have their new values, and are shards; local."""
        engine.mode.finish_parameters()
        # An evaluation leaves the root whole.
        free_unsharded(engine.module)

    def _saves_whole(self) -> bool:
        plugin = getattr(self.state, "fsdp_plugin", None)
        of_accelerate = plugin is not None and plugin.state_dict_type == StateDictType.FULL_STATE_DICT
        return of_accelerate or not self.options.save_distributed_checkpoint
