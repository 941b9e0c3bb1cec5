"""A ``Trainer`` of transformers that saves and resumes what ``from_pretrained(distributed_config=...)`` has sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import transformers
from torch import nn
from typing_extensions import override

from lightning_muon.checkpoint.loading import Checkpoint
from lightning_muon.checkpoint.saving import State, save
from lightning_muon.compat.torch import free_unsharded
from lightning_muon.integrations.transformers.optimizer import require_one_sharding
from lightning_muon.optim.planned_optimizer import PlannedOptimizer

_FOLDER, _METADATA = "sharded", "meta.pt"  # In a folder checkpoint-N, beside the whole weights.
_MODEL, _OPTIMIZER, _SCHEDULER = "model", "optimizer", "scheduler"


class Trainer(transformers.Trainer):
    """A ``transformers.Trainer`` that saves the state of the optimizer also for models sharded at load time.

    ``from_pretrained(distributed_config=...)`` shards a model as it loads it (FSDP2, HSDP, tensor parallel), and the
    Trainer of transformers then refuses to save the optimizer and to resume. This one writes model and optimizer as
    shards to ``checkpoint-N/sharded``, with hashes, and ``train(resume_from_checkpoint=...)`` reads them on any number
    of ranks and any mesh. ``checkpoint-N`` itself still is a folder for ``from_pretrained``. Any other model is saved
    as transformers does it. Arguments are those of ``transformers.Trainer``.

    Example::

        model = AutoModelForCausalLM.from_pretrained(name, distributed_config=DistributedConfig(fsdp_size=8))
        muon = lightning_muon.hf.optimizer()
        trainer = lightning_muon.hf.Trainer(model, args, train_dataset=data, optimizer_cls_and_kwargs=muon)
        trainer.train(resume_from_checkpoint=True)
    """

    def __init__(self, model: Any = None, args: Any = None, *more: Any, **options: Any) -> None:
        require_one_sharding(model)
        # The refusal is in the constructor, and asks for this option.
        is_sharded = getattr(model, "is_distributed_loading_by_transformers", False)
        refused = args if is_sharded and args is not None and not args.save_only_model else None
        if refused is not None:
            refused.save_only_model = True
        super().__init__(model, args, *more, **options)
        if refused is not None:
            refused.save_only_model = False

    @property
    def _sharded_model(self) -> Any:
        """The model, if it was sharded at load time."""
        return self.model if getattr(self, "is_distributed_loading_by_transformers", False) else None

    def _state_of(self, model: nn.Module) -> State:
        free_unsharded(model)  # An evaluation leaves the root whole.
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate wraps it.
        state = State(optimizers={_OPTIMIZER: (model, optimizer)}, modules={_MODEL: (model, [optimizer])})
        if isinstance(optimizer, PlannedOptimizer):
            state.checks[_OPTIMIZER] = optimizer.finite_check
        return state

    @override
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        model, scheduler = self._sharded_model, self.lr_scheduler
        if model is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state = self._state_of(model)
        state.rest[_SCHEDULER] = cast("Any", scheduler).state_dict()
        save(Path(output_dir) / _FOLDER, state, model._device_mesh, filters={}, metadata_name=_METADATA)

    @override
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        own = self._sharded_model
        if own is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        free_unsharded(own)
        self._open(resume_from_checkpoint).load_weights(_MODEL, own, strict=True)

    @override
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        model = self._sharded_model
        if model is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        saved, state = self._open(checkpoint), self._state_of(model)
        saved.load_optimizer(_OPTIMIZER, *state.optimizers[_OPTIMIZER])
        saved.load_skipped_steps(state.checks)
        cast("Any", self.lr_scheduler).load_state_dict(saved.content[_SCHEDULER])

    def _open(self, checkpoint: str) -> Checkpoint:
        """Collective; every rank must call it."""
        found = Checkpoint.open(Path(checkpoint) / _FOLDER, metadata_name=_METADATA, weights_only=True)
        found.state_advice = "load the weights with from_pretrained, and train without resume_from_checkpoint"
        return found
