"""Checkpoints whose keys a program chooses, in the format of Fabric's ``ModelParallelStrategy``: shards or one file."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.comm.agreement import together
from lightning_muon.integrations.buffers import broadcast_buffers
from lightning_muon.integrations.checkpoint import Checkpoint, full_weights, numbered_optimizer_state
from lightning_muon.integrations.node_weights import common_weights, copied, of_first_node
from lightning_muon.integrations.replacement import write_checkpoint

Filters = Mapping[str, Callable[[str, Any], bool]]


@dataclass
class State:
    """What a program saves or loads, by kind; the keys are its own.

    Attributes:
        modules: Key -> a module and the optimizers that step it.
        optimizers: Key -> an optimizer and the module that it steps, which comes first.
        rest: Everything else.
    """

    modules: dict[str, tuple[nn.Module, Sequence[torch.optim.Optimizer]]] = field(default_factory=dict)
    optimizers: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)


def save(path: Path, state: State, mesh: DeviceMesh, *, filters: Filters, metadata_name: str | None) -> None:
    """Write a checkpoint. Collective over all ranks; every rank must call it.

    Args:
        path: The same on all ranks; see :func:`lightning_muon.integrations.replacement.replacing` for what becomes of
            a checkpoint that is there.
        state: What to write.
        mesh: The ranks with batches of their own.
        filters: Key -> (name, value) -> whether to write it.
        metadata_name: Name of the file beside the shards that holds all but tensors; ``None``: one file for everything.
    """
    whole = metadata_name is None
    content: dict[str, Any] = {}
    for key, (module, optimizers) in state.modules.items():
        content[key] = weights_to_save(module, optimizers, mesh, whole=whole)
    for key, (module, optimizer) in state.optimizers.items():
        content[key] = optimizer_state_to_save(module, optimizer, whole=whole)
    # On all ranks or none: filters and objects are the program's own, and only rank 0 has whole weights.
    content = together(lambda: _filtered(content, filters))
    rest = together(lambda: _filtered(_plain(state.rest), filters))
    write_checkpoint(path, content, rest, metadata_name=metadata_name)


class StateCheckpoint(Checkpoint):
    """A checkpoint that is being read, whose keys are those of the program that saved it."""

    otherwise = "strict=False loads what fits"

    def __init__(self, path: Path, *, metadata_name: str, weights_only: bool | None) -> None:
        super().__init__(path, metadata_name=metadata_name, weights_only=weights_only)
        self._keys_of_shards: set[str] = set()
        if self.is_sharded:
            # Made up by the base class, where the checkpoint is that of a Trainer.
            self.content.pop("optimizer_states", None)
            places = dcp.FileSystemReader(path).read_metadata().planner_data or {}
            self._keys_of_shards = {place[0] for place in places.values()}

    @classmethod
    def open(cls, path: Path, *, metadata_name: str, weights_only: bool | None) -> StateCheckpoint:
        """Read all but tensors. Collective over all ranks; every rank must call it."""
        return together(lambda: cls(path, metadata_name=metadata_name, weights_only=weights_only))

    def load(self, state: State, target: dict[str, Any], *, strict: bool) -> dict[str, Any]:
        """Load everything that ``state`` names. Collective over all ranks; every rank must call it.

        Args:
            state: Modules and optimizers to fill, and what else is asked for.
            target: Gets what is neither module nor optimizer, unless it can load it itself, as schedulers can.
            strict: Whether what is asked for must be there, and weights fit exactly.

        Returns:
            What is in the checkpoint beside that, without shards.
        """
        absent = self._absent(state, strict=strict)
        for key, (module, _) in state.modules.items():
            if key not in absent:
                self.load_module(key, module, strict=strict)
        for key, (module, optimizer) in state.optimizers.items():
            if key not in absent:
                self.load_state_of(key, module, optimizer)
        for key, value in state.rest.items():
            if key in absent:
                continue
            if isinstance(value, Stateful):
                value.load_state_dict(self.content.pop(key))
            else:
                target[key] = self.content.pop(key)
        return {key: value for key, value in self.content.items() if key not in state.modules | state.optimizers}

    def load_module(self, key: str, module: nn.Module, *, strict: bool) -> None:
        """Fill parameters and buffers. Collective over all ranks; every rank must call it."""
        self.strict = strict
        if not self.is_sharded:
            self.weights = self.content[key]
        self.load_weights(module, key)

    def load_state_of(self, key: str, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Fill the state of an optimizer. Collective over all ranks; every rank must call it."""
        self._load_state(key, module, optimizer, whole=lambda: self.content[key], instead=f"load without {key!r}")

    def _absent(self, state: State, *, strict: bool) -> set[str]:
        """Keys of ``state`` that are not there. If nothing is, or ``strict``, that is an error, else a warning."""
        divided = state.modules.keys() | state.optimizers.keys()
        there = self._keys_of_shards if self.is_sharded else self.content.keys()
        absent = {key for key in divided if key not in there} | (state.rest.keys() - self.content.keys())
        if not absent:
            return absent
        saved = sorted(map(str, self._keys_of_shards | self.content.keys()))
        message = f"{self.path} has no {', '.join(sorted(map(repr, absent)))}; it has {saved}"
        if strict:
            raise KeyError(f"{message}, and strict=False loads what is there")
        if absent == divided | state.rest.keys():
            raise KeyError(f"{message}, and so nothing that could be loaded")
        if dist.get_rank() == 0:
            warnings.warn(f"{message}. What is not there stays as it is, because of strict=False.", stacklevel=2)
        return absent


def load_alone(checkpoint: StateCheckpoint, state: State, *, strict: bool) -> None:
    """Fill the one module or optimizer of ``state`` from a file that is its state dict.

    Collective over all ranks; every rank must call it.
    """
    if checkpoint.is_sharded:
        raise ValueError(
            f"{checkpoint.path} is a directory of shards, which are found by their keys only: "
            "fabric.load(path, {'model': model}), with the keys of fabric.save"
        )
    checkpoint.content = {"": checkpoint.content}
    checkpoint.load(state, {}, strict=strict)


def weights_to_save(
    module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], mesh: DeviceMesh, *, whole: bool
) -> dict[str, Any]:
    """Weights that all nodes have in common. Collective over all ranks; every rank must call it."""
    broadcast_buffers(module)
    with common_weights(optimizers) as differ:
        if whole:
            return copied(full_weights(module)) if differ else full_weights(module)
        state: dict[str, Any] = get_model_state_dict(module, options=StateDictOptions(cpu_offload=True))
        return of_first_node(state, mesh) if differ else state


def optimizer_state_to_save(module: nn.Module, optimizer: torch.optim.Optimizer, *, whole: bool) -> dict[str, Any]:
    """State by name in shards, or by number on rank 0. Collective over all ranks; every rank must call it."""
    options = StateDictOptions(full_state_dict=whole, cpu_offload=True)
    state: dict[str, Any] = get_optimizer_state_dict(module, optimizer, options=options)  # type: ignore[assignment]
    return numbered_optimizer_state(state, module, optimizer) if whole and state else state


def _plain(rest: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in rest.items()}


def _filtered(content: dict[str, Any], filters: Filters) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in content.items():
        if key not in filters:
            result[key] = value
        elif isinstance(value, Mapping):
            result[key] = {name: item for name, item in value.items() if filters[key](name, item)}
        elif filters[key](key, value):
            result[key] = value
    return result
