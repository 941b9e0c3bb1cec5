"""Weights and states of optimizers in the directories and files that Accelerate uses for FSDP2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.checkpoint.loading import StateCheckpoint
from lightning_muon.checkpoint.saving import weights_to_save, write_shards
from lightning_muon.checkpoint.staging import last_written, replacing
from lightning_muon.comm.agreement import on_first_rank, together

# The names that Accelerate gives to models and optimizers of FSDP2, and the keys inside of their directories.
_MODEL, _MODEL_KEY = "pytorch_model_fsdp", "model"
_OPTIMIZER, _OPTIMIZER_KEY = "optimizer", "optimizer"


def save_parts(
    directory: Path,
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    mesh: DeviceMesh,
    *,
    whole: bool,
    with_model: bool = True,
) -> None:
    """Write weights and states of optimizers. Collective over all ranks; every rank must call it.

    None of what was there goes before all is written.

    Args:
        directory: The same on all ranks.
        module: Divided.
        optimizers: Those that step it.
        mesh: The ranks with batches of their own.
        whole: One file for each, in place of directories with the shards of each rank.
        with_model: Write the weights, too; the same on all ranks.
    """
    options = StateDictOptions(full_state_dict=whole, cpu_offload=True)
    places = [_paths(directory, _OPTIMIZER, index) for index in range(len(optimizers))]
    if with_model:
        places.append(_paths(directory, _MODEL, 0))
    # What was saved in the other format goes in the same moment.
    obsolete = [place[not whole] for place in places]
    with replacing(*(place[whole] for place in places), whole=whole, obsolete=obsolete) as drafts:
        if with_model:
            _write(drafts[-1], {_MODEL_KEY: weights_to_save(module, optimizers, mesh, whole=whole)}, whole=whole)
        for draft, optimizer in zip(drafts, optimizers, strict=False):
            state = get_optimizer_state_dict(module, optimizer, options=options)
            _write(draft, {_OPTIMIZER_KEY: state}, whole=whole)


def load_parts(
    directory: Path, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, with_model: bool = True
) -> None:
    """Read what :func:`save_parts` wrote on any number of ranks. Collective over all ranks; every rank must call it.

    Raises:
        FileNotFoundError: On all ranks, if there is nothing.
        RuntimeError: On all ranks, if it does not fit.
    """
    if with_model:
        _Part.find(directory, _MODEL, 0, _MODEL_KEY).load_module(_MODEL_KEY, module, strict=True)
    for index, optimizer in enumerate(optimizers):
        part = _Part.find(directory, _OPTIMIZER, index, _OPTIMIZER_KEY)
        part.load_state_of(_OPTIMIZER_KEY, module, optimizer)


class _Part(StateCheckpoint):
    """The directory with the shards of one object, or the file with all of it."""

    otherwise = "load_state needs the model that was saved"

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.is_sharded, self.strict = path, path.is_dir(), True
        self.weights: Mapping[str, Any] = {}
        options: dict[str, Any] = {"map_location": "cpu", "mmap": True, "weights_only": True}
        self.content: dict[str, Any] = {} if self.is_sharded else {key: torch.load(path, **options)}

    @classmethod
    def find(cls, directory: Path, name: str, index: int, key: str) -> _Part:
        """Open what is there. Collective over all ranks; every rank must call it."""
        paths = _paths(directory, name, index)
        # Rank 0 decides: a save may be about to end while the ranks look.
        found = [next((path for path in map(last_written, paths) if path.exists()), None)]
        dist.broadcast_object_list(found, src=0)

        def look() -> _Part:
            path = found[0]
            if path is None or not path.exists():
                raise FileNotFoundError(
                    f"{directory} has neither {paths[0].name} nor {paths[1].name}; load_state reads what save_state of "
                    "an Accelerator with as many optimizers wrote, in a directory that every rank sees"
                )
            return cls(path, key)

        return together(look)


def _paths(directory: Path, name: str, index: int) -> tuple[Path, Path]:
    """The directory of shards, and the file."""
    return directory / f"{name}_{index}", directory / (f"{name}_{index}.bin" if index else f"{name}.bin")


def _write(path: Path, content: Mapping[str, Any], *, whole: bool) -> None:
    """Write one object. Collective over all ranks; every rank must call it."""
    if not whole:
        write_shards(content, path)
        return
    (value,) = content.values()
    on_first_rank(lambda: torch.save(value, path))
