"""Checkpoints of a Trainer: one directory of shards or one file, with the keys that Lightning gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from lightning_muon.checkpoint.loading import Checkpoint
from lightning_muon.checkpoint.nodes import forget_own
from lightning_muon.comm.agreement import missing_at
from lightning_muon.compat.torch import default_store
from lightning_muon.engine.training import TrainingEngine

_SECONDS_TO_FAIL_TOGETHER = 10.0


class TrainerCheckpoint(Checkpoint):
    """A checkpoint that is opened before ``setup``, for callbacks; weights and optimizer states follow."""

    weights_advice = "LightningModule.strict_loading = False loads what fits"
    state_advice = "load them into the model and train without resuming (Trainer.fit without ckpt_path)"
    # Weights that wait for the model to be sharded, and whether their names must be those of the model.
    pending: tuple[Mapping[str, Any], bool] | None = None

    def __init__(self, path: Path, content: dict[str, Any], *, is_sharded: bool, **options: Any) -> None:
        super().__init__(path, content, is_sharded=is_sharded, **options)
        keys = self.reader.read_metadata().state_dict_metadata if is_sharded else {}
        if optimizers := {key.split(".", 1)[0] for key in keys if key.startswith("optimizer_")}:
            # Lightning asks whether the key is there; the states follow later.
            content["optimizer_states"] = [{} for _ in optimizers]

    def load_pending_weights(self, engine: TrainingEngine, optimizers: Sequence[Any]) -> None:
        """Load the weights, if some wait, which ``optimizers`` go on with. Collective over all ranks."""
        if self.pending is not None:
            _, strict = self.pending
            forget_own(optimizers)
            self.load_weights("state_dict", engine.module, strict=strict)
            self.pending = None

    @override
    def whole(self, key: str) -> Any:
        if key == "state_dict":
            assert self.pending is not None
            return self.pending[0]
        states: Any = self.content["optimizer_states"]
        return states[int(key.removeprefix("optimizer_"))]


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
