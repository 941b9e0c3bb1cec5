"""Checkpoints whose keys a program chooses, in the format of Fabric's ``ModelParallelStrategy``: shards or one file."""

from __future__ import annotations

import shutil
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

from lightning_muon.comm.agreement import fail_together
from lightning_muon.integrations.checkpoint import Checkpoint, full_weights, numbered_optimizer_state
from lightning_muon.integrations.lightning.evaluation import broadcast_buffers
from lightning_muon.integrations.node_weights import common_weights, copied, of_first_node

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
        path: The same on all ranks; a checkpoint that is there is replaced.
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
    rest = {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state.rest.items()}
    content, rest = _filtered(content, filters), _filtered(rest, filters)
    together(lambda: _require_replaceable(path))
    on_first_rank(lambda: _clear(path, metadata_name))
    if metadata_name is None:
        on_first_rank(lambda: torch.save(content | rest, path))
        return
    dcp.save(content, checkpoint_id=path)
    on_first_rank(lambda: torch.save(rest, path / metadata_name))


class StateCheckpoint(Checkpoint):
    """A checkpoint that is being read, whose keys are those of the program that saved it."""

    def __init__(self, path: Path, *, metadata_name: str, weights_only: bool | None) -> None:
        super().__init__(path, metadata_name=metadata_name, weights_only=weights_only)
        if self.is_sharded:
            # Made up by the base class, where the checkpoint is that of a Trainer.
            self.content.pop("optimizer_states", None)

    @classmethod
    def open(cls, path: Path, *, metadata_name: str, weights_only: bool | None) -> StateCheckpoint:
        """Read all but tensors. Collective over all ranks; every rank must call it."""
        found: list[StateCheckpoint] = []
        together(lambda: found.append(cls(path, metadata_name=metadata_name, weights_only=weights_only)))
        return found[0]

    def load(self, state: State, target: dict[str, Any], *, strict: bool) -> dict[str, Any]:
        """Load everything that ``state`` names. Collective over all ranks; every rank must call it.

        Args:
            state: Modules and optimizers to fill, and what else is asked for.
            target: Gets what is neither module nor optimizer, unless it can load it itself, as schedulers can.
            strict: Whether what is asked for must be there, and weights fit exactly.

        Returns:
            What is in the checkpoint beside that, without shards.
        """
        missing = [key for key in state.rest if key not in self.content]
        if strict and missing:
            raise KeyError(
                f"{self.path} has no {', '.join(map(repr, missing))}; it has {sorted(self.content)} beside shards, and "
                "strict=False loads what is there"
            )
        for key, (module, _) in state.modules.items():
            self.load_module(key, module, strict=strict)
        for key, (module, optimizer) in state.optimizers.items():
            self.load_state_of(key, module, optimizer)
        for key, value in state.rest.items():
            if key not in self.content:
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
            self._require_key(key)
            self.weights = self.content[key]
        self.load_weights(module, key)

    def load_state_of(self, key: str, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Fill the state of an optimizer. Collective over all ranks; every rank must call it."""

        def whole() -> Mapping[str, Any]:
            self._require_key(key)
            return self.content[key]

        self._load_state(key, module, optimizer, whole=whole, instead=f"load without {key!r}")

    def _require_key(self, key: str) -> None:
        if key not in self.content:
            raise KeyError(f"{self.path} has no {key!r}; it has {sorted(map(str, self.content))}")


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


def _require_replaceable(path: Path) -> None:
    """Raise for a directory that is no checkpoint, rather than remove it."""
    if path.is_dir() and any(path.iterdir()) and not (path / ".metadata").is_file():
        raise IsADirectoryError(f"{path} is a directory with other files; save the checkpoint under another name")


def _clear(path: Path, metadata_name: str | None) -> None:
    """Make place for a checkpoint."""
    if path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)
    (path if metadata_name is not None else path.parent).mkdir(parents=True, exist_ok=True)


def on_first_rank(action: Callable[[], Any]) -> None:
    """Run ``action`` on rank 0 and wait for it. Collective over all ranks; every rank must call it."""
    together(action if dist.get_rank() == 0 else lambda: None)


def together(action: Callable[[], Any]) -> None:
    """Run ``action``; if it fails on any rank, all raise. Collective over all ranks; every rank must call it."""
    error: Exception | None = None
    try:
        action()
    except Exception as problem:  # Also unpickling, which runs code of any kind.
        error = problem
    fail_together(error, None)
