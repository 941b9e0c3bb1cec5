"""Reading a checkpoint: a directory of shards, or a single file in the format of a program that runs in one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.stateful import Stateful

from lightning_muon.checkpoint.nodes import expect_saved_nodes, share_whole
from lightning_muon.checkpoint.saving import State, names_in_groups
from lightning_muon.comm.agreement import fail_together, together
from lightning_muon.flexdemo.node_state import Rule
from lightning_muon.flexdemo.optimizer import FlexDeMo
from lightning_muon.params.uses import clean_name


class Checkpoint:
    """A checkpoint that is being read: everything but tensors at once, tensors when the model is ready for them.

    Args:
        path: Directory of shards or single file, the same on all ranks.
        content: All that is in the single file, or what is beside the shards.
        is_sharded: Whether there are shards.

    Attributes:
        advice: What to do if the weights do not fit.
    """

    advice = "strict=False loads what fits"

    def __init__(self, path: Path, content: dict[str, Any], *, is_sharded: bool) -> None:
        self.path, self.content, self.is_sharded = path, content, is_sharded

    @classmethod
    def open(cls, path: Path, *, metadata_name: str, weights_only: bool | None) -> Self:
        """Read everything but shards. Collective over all ranks; every rank must call it.

        Args:
            path: The same on all ranks.
            metadata_name: File that marks a directory of shards and holds all but tensors.
            weights_only: As in ``torch.load``.

        Raises:
            FileNotFoundError: On all ranks, if any of them sees no checkpoint.
        """

        def read() -> Self:
            content, is_sharded = _read(path, metadata_name, weights_only)
            return cls(path, content, is_sharded=is_sharded)

        return together(read)

    def load_weights(self, module: nn.Module, key: str, *, strict: bool, whole: Mapping[str, Any] | None) -> None:
        """Fill parameters and buffers. Collective over all ranks; every rank must call it.

        Args:
            module: To fill, in its final form.
            key: Of the weights among the shards.
            strict: Whether the names must be those of the module.
            whole: The weights in a single file.
        """
        if whole is None:
            weights = {key: get_model_state_dict(module)}
            planner = DefaultLoadPlanner(allow_partial_load=not strict)
            try:
                load(weights, checkpoint_id=self.path, planner=planner)
            except CheckpointException as problem:  # On all ranks; and no Exception, so that it ends a process.
                raise RuntimeError(
                    f"{key!r} in {self.path} does not fit {type(module).__name__}; {self.advice}. ({problem})"
                ) from problem
            set_model_state_dict(module, weights[key], options=StateDictOptions(strict=strict))
            return
        weights = {clean_name(name): value for name, value in whole.items()}
        own = {clean_name(name) for name in module.state_dict()}
        missing, unexpected = sorted(own - weights.keys()), sorted(weights.keys() - own)
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"{self.path} does not fit {type(module).__name__}: missing {missing[:8] or 'nothing'}, unexpected "
                f"{unexpected[:8] or 'nothing'}; {self.advice}"
            )
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        set_model_state_dict(module, {name: weights[name] for name in weights if name in own}, options=options)

    def load_optimizer(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        key: str,
        *,
        whole: Callable[[], Mapping[str, Any]],
        advice: str,
    ) -> None:
        """Fill the state of an optimizer. Collective over all ranks; every rank must call it.

        Args:
            module: Holds the parameters.
            optimizer: To fill.
            key: Of the state among the shards.
            whole: Returns the state in a single file.
            advice: How to go on with the weights alone.
        """
        error: Exception | None = None
        try:
            if self.is_sharded:
                self._load_shards(module, optimizer, key)
            else:
                _load_whole(whole(), module, optimizer)
        except (KeyError, ValueError, RuntimeError, CheckpointException) as problem:
            error = RuntimeError(
                f"the state {key!r} in {self.path} does not fit {type(optimizer).__name__}: it was saved with another "
                "optimizer, other options, other param groups or another model. To go on with the weights alone, "
                f"{advice}. ({type(problem).__name__}: {problem})"
            )
            error.__cause__ = problem
        fail_together(error, None)

    def load_module_at(self, key: str, module: nn.Module, *, strict: bool) -> None:
        """Fill a module from what a program has saved under ``key``. Collective; every rank must call it."""
        self.load_weights(module, key, strict=strict, whole=None if self.is_sharded else self.content[key])

    def load_optimizer_at(self, key: str, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Fill an optimizer from what a program has saved under ``key``. Collective; every rank must call it."""
        advice = f"load without {key!r}"
        self.load_optimizer(module, optimizer, key, whole=lambda: self.content[key], advice=advice)

    def load(self, state: State, target: dict[str, Any], *, strict: bool) -> dict[str, Any]:
        """Load everything that ``state`` names. Collective over all ranks; every rank must call it.

        Args:
            state: Modules and optimizers to fill, and what else is asked for, by the keys of the program.
            target: Gets what is neither module nor optimizer, unless it can load it itself, as schedulers can.
            strict: Whether what is asked for must be there, and weights fit exactly.

        Returns:
            What is in the checkpoint beside that, without shards.
        """
        absent = self._absent(state, strict=strict)
        for key, (module, _) in state.modules.items():
            if key not in absent:
                self.load_module_at(key, module, strict=strict)
        for key, (module, optimizer) in state.optimizers.items():
            if key not in absent:
                self.load_optimizer_at(key, module, optimizer)
        for key, value in state.rest.items():
            if key in absent:
                continue
            if isinstance(value, Stateful):
                value.load_state_dict(self.content.pop(key))
            else:
                target[key] = self.content.pop(key)
        return {key: value for key, value in self.content.items() if key not in state.modules | state.optimizers}

    def load_alone(self, state: State, *, strict: bool) -> None:
        """Fill the one module or optimizer of ``state`` from a file that is its state dict.

        Collective over all ranks; every rank must call it.
        """
        if self.is_sharded:
            raise ValueError(
                f"{self.path} is a directory of shards, which are found by their keys only: "
                "fabric.load(path, {'model': model}), with the keys of fabric.save"
            )
        self.content = {"": self.content}
        self.load(state, {}, strict=strict)

    def _load_shards(self, module: nn.Module, optimizer: torch.optim.Optimizer, key: str) -> None:
        state: dict[str, Any] = {key: get_optimizer_state_dict(module, optimizer)}
        saved: Any = FileSystemReader(self.path).read_metadata().state_dict_metadata
        _check_shards(saved, state[key], key)
        share_among_nodes = expect_saved_nodes(
            state[key]["state"],
            lambda name, entry: saved[f"{key}.state.{name}.{entry}"].size,
            _rules(optimizer),
        )
        # Keys of the groups may be new, for example those of a scheduler that was added since.
        load(state, checkpoint_id=self.path, planner=DefaultLoadPlanner(allow_partial_load=True))
        share_among_nodes()
        set_optimizer_state_dict(module, optimizer, state[key])

    def _absent(self, state: State, *, strict: bool) -> set[str]:
        """Keys of ``state`` that are not there. If nothing is, or ``strict``, that is an error, else a warning."""
        sharded: set[str] = set()
        if self.is_sharded:
            places = FileSystemReader(self.path).read_metadata().planner_data or {}
            sharded = {place[0] for place in places.values()}
        wanted = state.modules.keys() | state.optimizers.keys()
        there = sharded if self.is_sharded else self.content.keys()
        absent = {key for key in wanted if key not in there} | (state.rest.keys() - self.content.keys())
        if not absent:
            return absent
        saved = sorted(map(str, sharded | self.content.keys()))
        message = f"{self.path} has no {', '.join(sorted(map(repr, absent)))}; it has {saved}"
        if strict:
            raise KeyError(f"{message}, and strict=False loads what is there")
        if absent == wanted | state.rest.keys():
            raise KeyError(f"{message}, and so nothing that could be loaded")
        if dist.get_rank() == 0:
            warnings.warn(f"{message}. What is not there stays as it is, because of strict=False.", stacklevel=2)
        return absent


def count_optimizers(path: Path) -> int:
    """How many states of optimizers a Trainer has saved among the shards in ``path``."""
    keys = FileSystemReader(path).read_metadata().state_dict_metadata
    return len({key.split(".", 1)[0] for key in keys if key.startswith("optimizer_")})


def _read(path: Path, metadata_name: str, weights_only: bool | None) -> tuple[dict[str, Any], bool]:
    """What is in a checkpoint beside its shards, and whether it has some."""
    if (path / metadata_name).is_file():
        return torch.load(path / metadata_name, map_location="cpu", weights_only=weights_only), True
    if path.is_file():
        return torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only), False
    raise FileNotFoundError(
        f"{path} is no checkpoint: neither a file nor a directory with {metadata_name}, which every rank must see"
    )


def _load_whole(saved: Mapping[str, Any], module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    named = named_optimizer_state(saved, module, optimizer)
    own = _state_by_name(module, optimizer)
    _check_state(named["state"], own)
    named["state"] = share_whole(named["state"], own, _rules(optimizer))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(module, optimizer, named, options=options)


def named_optimizer_state(
    state: Mapping[str, Any], module: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Inverse of :func:`numbered_optimizer_state`; a state that goes by names already is returned as it is.

    Raises:
        ValueError: If the param groups have other sizes than those of ``optimizer``.
    """
    if any(isinstance(name, str) for group in state["param_groups"] for name in group["params"]):
        return dict(state)
    saved = [len(group["params"]) for group in state["param_groups"]]
    ours = [len(group["params"]) for group in optimizer.param_groups]
    if saved != ours:
        raise ValueError(f"the checkpoint has param groups of {saved} parameters, the optimizer of {ours}")
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    names = dict(zip(numbers, names_in_groups(module, optimizer), strict=True))
    groups = [
        {**ours, **group, "params": [names[number] for number in group["params"]]}
        for ours, group in zip(optimizer.param_groups, state["param_groups"], strict=True)
    ]
    return {"state": {names[number]: value for number, value in state["state"].items()}, "param_groups": groups}


def _check_shards(saved: Iterable[str], state: Mapping[str, Any], key: str) -> None:
    """Raise ``ValueError`` unless the names in ``saved`` are those of ``state``, as in :func:`_check_state`."""
    prefix = f"{key}.param_groups."
    num_saved = len({name.removeprefix(prefix).split(".")[0] for name in saved if name.startswith(prefix)})
    if num_saved != len(state["param_groups"]):
        raise ValueError(f"{num_saved} param groups in the checkpoint, {len(state['param_groups'])} here")
    entries: dict[str, set[str]] = {}
    prefix = f"{key}.state."
    for name in saved:
        if name.startswith(prefix):
            parameter, entry = name.removeprefix(prefix).rsplit(".", 1)
            entries.setdefault(parameter, set()).add(entry)
    _check_state(entries, state["state"])


def _check_state(saved: Mapping[str, Iterable[str]], own: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ``ValueError`` unless the saved state has the entries that the optimizer has, and no others.

    torch leaves out what is missing, and drops what is too much. Optimizers that create state at their first step are
    not checked, nor is what a checkpoint has of parameters that are frozen now.
    """
    for name, state in own.items():
        there = set(saved.get(name, ()))
        if state and set(state) != there:
            raise ValueError(
                f"{name} has {sorted(state)} here, but {sorted(there)} in the checkpoint: only here "
                f"{sorted(state.keys() - there) or 'nothing'}, only there {sorted(there - state.keys()) or 'nothing'}"
            )


def _rules(optimizer: torch.optim.Optimizer) -> Mapping[str, Rule]:
    """What becomes of the state of each node where their number has changed."""
    return optimizer.per_node if isinstance(optimizer, FlexDeMo) else {}


def _state_by_name(module: nn.Module, optimizer: torch.optim.Optimizer) -> Mapping[str, Mapping[str, Any]]:
    """What the optimizer would save; nothing if it creates state at its first step."""
    return get_optimizer_state_dict(module, optimizer)["state"] if optimizer.state else {}  # type: ignore[return-value]
