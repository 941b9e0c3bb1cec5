"""Finds the newest checkpoint that is intact, and reads it: a directory of shards, or a file as of one process."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import empty as distributed_empty

from lightning_muon.checkpoint.manifest import CLOCK, INDEX, MANIFEST, damages, describe
from lightning_muon.checkpoint.saving import NAMES, OptimizerState, Parts, Weights, names_in_groups
from lightning_muon.checkpoint.staging import last_written, names_in
from lightning_muon.comm.agreement import fail_together, gather, together
from lightning_muon.compat.torch import CheckpointReader
from lightning_muon.errors import DamagedCheckpointError
from lightning_muon.params.layers import clean_name
from lightning_muon.params.layout import divided_as, local_tensor, own_part_of, parameters_of
from lightning_muon.pipeline.runtime import group_of, is_stage, names_of_copies
from lightning_muon.sharding.base import joined_state_dicts
from lightning_muon.sharding.units import original_class

_NUM_SHOWN = 4  # Names of each kind in an error.


class Checkpoint:
    """A checkpoint that is being read; ``content`` is that of the single file, or of the file beside the shards."""

    def __init__(
        self, path: Path, content: dict[str, Any], *, is_sharded: bool, weights_only: bool | None = None
    ) -> None:
        self.path, self.content, self.is_sharded = path, content, is_sharded
        self._weights_only = weights_only

    @classmethod
    def open(cls, *paths: Path, metadata_name: str | None, weights_only: bool | None) -> Self:
        """Read the first of ``paths`` that is not damaged, but no shards; ``metadata_name`` is the file beside them.

        Collective over all ranks.
        """
        path, mark = first_intact(paths), metadata_name or INDEX

        def look() -> bool:
            if not path.is_file() and not (path / mark).is_file():
                raise FileNotFoundError(
                    f"{path} is no checkpoint: every rank must see a file, or a directory with {mark}, there"
                )
            return path.is_dir()

        is_sharded = together(look)
        read_file = partial(torch.load, map_location="cpu", weights_only=weights_only)
        if not is_sharded:
            content = together(lambda: read_file(path, mmap=True))
        else:
            content = together(lambda: read_file(path / metadata_name)) if metadata_name else {}
        if not isinstance(content, dict):
            raise TypeError(f"{path} is no checkpoint: it has a {type(content).__name__} in place of a dict")
        return cls(path, content, is_sharded=is_sharded, weights_only=weights_only)

    @property
    def reader(self) -> CheckpointReader:
        """What reads the shards."""
        return CheckpointReader(self.path, weights_only=self._weights_only)

    def shards_with(self, prefix: str) -> set[str]:
        """Keys of shards that begin with ``prefix``; local."""
        keys = self.reader.read_metadata().state_dict_metadata
        return {key.partition(".")[0] for key in keys if key.startswith(prefix)}

    def load(self, parts: Parts, target: dict[str, Any], *, strict: bool) -> dict[str, Any]:
        """Load all ``parts``, and return the rest of the checkpoint, without shards.

        Values without ``load_state_dict`` go into ``target``. Collective over all ranks.
        """
        absent = self._absent(parts, strict=strict)
        wanted = {key: part for key, part in parts.items() if key not in absent}
        for key, part in sorted(wanted.items(), key=lambda item: not isinstance(item[1], Weights)):  # Weights first.
            if isinstance(part, Weights):
                self.load_weights(key, part.module, strict=strict)
            elif isinstance(part, OptimizerState):
                self.load_optimizer(key, part.module, part.optimizer)
            elif isinstance(part, Stateful):
                part.load_state_dict(self.content.pop(key))
            else:
                target[key] = self.content.pop(key)
        ours = {key for key, part in parts.items() if isinstance(part, Weights | OptimizerState)}
        return {key: value for key, value in self.content.items() if key not in ours}

    @joined_state_dicts()
    def load_weights(self, key: str, module: nn.Module, *, strict: bool) -> None:
        """Fill a module from what was saved under ``key``. Collective over all ranks."""
        if self.is_sharded:
            state = {key: get_model_state_dict(module)}
            sizes = {clean_name(name): getattr(value, "shape", None) for name, value in state[key].items()}
            saved = together(lambda: self._sizes_of_weights(key))
            self._check_weights(key, module, sizes, saved, strict=strict)
            planner = DefaultLoadPlanner(allow_partial_load=not strict)
            try:
                load(state, storage_reader=self.reader, planner=planner)
            except CheckpointException as problem:  # On all ranks. Not a subclass of Exception.
                raise RuntimeError(f"{key!r} in {self.path} cannot be read: {_first_failure(problem)}") from None
            set_model_state_dict(module, state[key], options=StateDictOptions(strict=strict))
            return
        weights = {clean_name(name): value for name, value in self.content[key].items()}
        own = {clean_name(name): getattr(value, "shape", None) for name, value in module.state_dict().items()}
        saved = {name: getattr(value, "shape", None) for name, value in weights.items()}
        self._check_weights(key, module, own, saved, strict=strict)
        # Stages of a pipeline have different weights, which each takes from the file.
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=not is_stage(module), strict=False)
        set_model_state_dict(module, {name: weights[name] for name in weights if name in own}, options=options)

    def load_tensors(self, key: str, module: nn.Module, tensors: dict[str, Tensor]) -> bool:
        """Fill tensors of ``module`` from what was saved by their names under ``key``, if anything was; or raise.

        Collective over all ranks.
        """
        is_sharded, values = self.is_sharded and bool(self.shards_with(key)), self.content.get(key, {})
        if is_sharded or key in self.content:
            own = {name: tensor.shape for name, tensor in tensors.items()}
            saved = self._sizes_of_weights(key) if is_sharded else {name: each.shape for name, each in values.items()}
            self._check_weights(key, module, own, saved, strict=True)
        if is_sharded:
            load({key: tensors}, storage_reader=self.reader)
        for name, value in values.items():
            like = tensors[name]
            local_tensor(like).copy_(own_part_of(value, like) if isinstance(like, DTensor) else value)
        return is_sharded or key in self.content

    def load_optimizer(self, key: str, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Fill an optimizer, which steps ``module``, from ``key``. Collective over all ranks."""
        error: Exception | None = None
        try:
            self._load_optimizer(key, module, optimizer)
        except (KeyError, ValueError, RuntimeError, CheckpointException) as problem:
            error = RuntimeError(
                f"the state {key!r} in {self.path} does not fit {type(optimizer).__name__}: it was saved with another "
                "optimizer, other options, other param groups or another model. To go on with the weights alone, load "
                f"them without it, and train without resuming. ({_first_failure(problem)})"
            )
        fail_together(error, None)

    def _load_optimizer(self, key: str, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        # It also lets optimizers make state that they would make at their first step.
        own: Any = get_optimizer_state_dict(module, optimizer)
        names, groups = names_in_groups(module, optimizer), optimizer.param_groups
        places = {
            name: {"": parameter, **own["state"].get(name, {})}
            for name, parameter in zip(names, parameters_of(optimizer), strict=True)
        }
        copies = names_of_copies(module)
        if self.is_sharded:
            states, options = self._read_optimizer(key, places, copies)
        else:
            sizes = [len(group["params"]) for group in groups]
            states, options = _optimizer_of_file(self.content[key], names, sizes, copies)
            states = {
                name: {entry: _placed(entry, value, places[name]) for entry, value in entries.items()}
                for name, entries in states.items()
            }
        if len(options) != len(groups):
            raise ValueError(f"{len(options)} param groups in the checkpoint, {len(groups)} here")
        before = [dict(group) for group in groups]
        entries = [set(optimizer.state.get(parameter, ())) for parameter in parameters_of(optimizer)]
        numbers = iter(range(len(names)))
        numbered = [
            {**new, "params": [next(numbers) for _ in old["params"]]} for new, old in zip(options, before, strict=True)
        ]
        state = {number: states[name] for number, name in enumerate(names) if name in states}
        optimizer.load_state_dict({"state": state, "param_groups": numbered})
        for name, parameter, known in zip(names, parameters_of(optimizer), entries, strict=True):
            if known and (unknown := optimizer.state.get(parameter, {}).keys() - known):
                raise ValueError(f"{name} has {sorted(known)} here, and the checkpoint {sorted(unknown)}, too")
        # Options may be newer than the checkpoint, for example those of a scheduler.
        for group, old in zip(optimizer.param_groups, before, strict=True):
            group.update({option: old[option] for option in old.keys() - group.keys()})

    def _read_optimizer(
        self, key: str, places: Mapping[str, Mapping[str, Any]], copies: Mapping[str, str]
    ) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
        """This rank's parts of what was saved of ``places``, and options of param groups. Collective over all ranks."""
        saved, saved_groups = dict[str, dict[str, Any]](), dict[int, dict[str, Any]]()
        for path, entry in self._entries(f"{key}.").items():
            part, _, rest = path.partition(".")
            if part == "state":
                name, entry_name = rest.rsplit(".", 1)
                saved.setdefault(name, {})[entry_name] = entry
            elif part == "param_groups":
                number, _, option = rest.partition(".")
                saved_groups.setdefault(int(number), {})[option] = entry
        # A copy of a parameter of another stage takes the state of that one, if the checkpoint has no copies.
        originals = {name: name if name in saved else copies.get(name, name) for name in places}
        found = {name: of for name, of in originals.items() if of in saved}
        if saved and places and not found:
            raise ValueError(f"it has the states of {next(iter(saved))}, ..., and none of {next(iter(places))}, ...")
        states = {
            of: {entry: _memory(entry, meta, places[name]) for entry, meta in saved[of].items()}
            for name, of in found.items()
        }
        groups = [
            # Not the names of parameters, which are those of one stage.
            {option: _memory(option, meta, {}) for option, meta in saved_groups[number].items() if option != "params"}
            for number in sorted(saved_groups)
        ]
        load({key: {"state": states, "param_groups": groups}}, storage_reader=self.reader)
        # Two parameters of this rank must not share a state.
        return {name: deepcopy(states[of]) if of != name else states[of] for name, of in found.items()}, groups

    def _entries(self, prefix: str) -> dict[str, Any]:
        """What torch's index says of each saved entry under ``prefix``; local."""
        saved = self.reader.read_metadata().state_dict_metadata
        return {name.removeprefix(prefix): entry for name, entry in saved.items() if name.startswith(prefix)}

    def _sizes_of_weights(self, key: str) -> dict[str, Any]:
        """Name -> size of each saved weight, ``None`` for other values; local."""
        sizes: dict[str, Any] = {}
        for name, entry in self._entries(f"{key}.").items():
            stem, mark, _ = name.partition("_extra_state")  # It may have entries of its own.
            sizes[stem + mark] = getattr(entry, "size", None)
        return sizes

    def _check_weights(
        self, key: str, module: nn.Module, own: Mapping[str, Any], saved: Mapping[str, Any], *, strict: bool
    ) -> None:
        """Raise on all ranks unless the names agree, if ``strict``, and the sizes; the same on all ranks of a stage.

        Collective over the stages of a pipeline.
        """
        stages = group_of(module)
        elsewhere = set[str]().union(*gather(set(own), stages))
        in_both = sorted(own.keys() & saved.keys())
        differing = {
            "missing in the checkpoint": sorted(own.keys() - saved.keys()) if strict else [],
            "unexpected": sorted(saved.keys() - own.keys() - elsewhere) if strict else [],
            "of another size": [
                f"{name} {tuple(saved[name])} in the checkpoint, {tuple(own[name])} in the model"
                for name in in_both
                if own[name] is not None and saved[name] is not None and own[name] != saved[name]
            ],
        }
        lines = [
            f"  {len(names)} {what}: {'; '.join(names[:_NUM_SHOWN])}{'; ...' if len(names) > _NUM_SHOWN else ''}"
            for what, names in differing.items()
            if names
        ]
        if not lines:
            fail_together(None, stages)
            return
        advice = "Give the path of a checkpoint of this model, or build the model that was saved"
        if not differing["of another size"]:
            advice += "; strict=False (in a LightningModule strict_loading = False) loads what fits"
        name = original_class(getattr(module, "_orig_mod", module)).__name__
        text = "\n".join([f"{key!r} in {self.path} does not fit {name}:", *lines, f"{advice}."])
        fail_together(RuntimeError(text), stages)

    def _absent(self, parts: Parts, *, strict: bool) -> set[str]:
        """Keys of ``parts`` that the checkpoint lacks; raise if ``strict`` or if it has none of them, else warn."""
        places = self.reader.read_metadata().planner_data if self.is_sharded else None
        sharded = {place[0] for place in (places or {}).values()}
        ours = {key for key, part in parts.items() if isinstance(part, Weights | OptimizerState)}
        there = sharded if self.is_sharded else self.content.keys()
        absent = (ours - there) | (parts.keys() - ours - self.content.keys())
        if not absent:
            return absent
        saved = sorted(map(str, sharded | self.content.keys()))
        message = f"{self.path} has no {', '.join(sorted(map(repr, absent)))}; it has {saved}"
        if strict:
            raise KeyError(f"{message}, and strict=False loads what is there")
        if absent == parts.keys():
            raise KeyError(f"{message}, and so nothing that could be loaded")
        if dist.get_rank() == 0:
            warnings.warn(f"{message}. What is not there stays as it is, because of strict=False.", stacklevel=2)
        return absent


def _optimizer_of_file(
    saved: Mapping[str, Any], names: Sequence[str], sizes: Sequence[int], copies: Mapping[str, str]
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """The states in a file by ``names``, of which each param group has so many, and the options of each group.

    A file without names, or with those of another model, has the parameters in the order of the optimizer.
    """
    groups = saved["param_groups"]
    numbers = list(chain.from_iterable(group["params"] for group in groups))
    known = list(chain.from_iterable(group.get(NAMES, group["params"]) for group in groups))
    originals = {name: name if name in set(known) else copies.get(name, name) for name in names}
    if not set(originals.values()) <= set(known):
        if [len(group["params"]) for group in groups] != list(sizes):
            of_file = [len(group["params"]) for group in groups]
            raise ValueError(f"the checkpoint has param groups of {of_file} parameters, the optimizer of {sizes}")
        known, originals = list(names), dict(zip(names, names, strict=True))
    of_name = dict(zip(known, numbers, strict=True))
    states = {name: saved["state"].get(of_name[original]) for name, original in originals.items()}
    options = [{key: value for key, value in group.items() if key not in ("params", NAMES)} for group in groups]
    return {name: dict(state) for name, state in states.items() if state}, options


def _memory(entry: str, saved: Any, places: Mapping[str, Any]) -> Any:
    """Where a saved entry is read to: a tensor like one of ``places`` of its size, else a whole one; local.

    ``places`` are the parameter, under ``""``, and its state; the entry itself is taken before others.
    """
    if not isinstance(saved, TensorStorageMetadata):
        return None
    own, size, dtype = places.get(entry), saved.size, saved.properties.dtype
    if isinstance(own, Tensor) and own.shape == size:
        return own
    if (like := _of_shape(size, places)) is not None:
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    if isinstance(own, DTensor) and own.ndim == len(size):  # It was saved of another number of nodes.
        ways = [Replicate() if isinstance(w, Shard) and size[w.dim] != own.shape[w.dim] else w for w in own.placements]
        return distributed_empty(size, dtype=own.dtype, device_mesh=own.device_mesh, placements=ways)
    return torch.empty(size, dtype=dtype, device="cpu")


def _placed(entry: str, value: Any, places: Mapping[str, Any]) -> Any:
    """This rank's part of a ``value`` that all ranks have, laid out as :func:`_memory` does, or a copy of it; local."""
    if not isinstance(value, Tensor):
        return value
    like = _of_shape(value.shape, {entry: places.get(entry), **places})
    return divided_as(value, like) if isinstance(like, DTensor) else value.clone()


def _of_shape(shape: Sequence[int], places: Mapping[str, Any]) -> Tensor | None:
    """The first tensor of this shape; local."""
    return next((each for each in places.values() if isinstance(each, Tensor) and each.shape == shape), None)


def _first_failure(problem: BaseException) -> str:
    """The error in one line, without the tracebacks of all ranks that torch adds."""
    if isinstance(problem, CheckpointException) and problem.failures:
        problem = next(iter(problem.failures.values()))[0]
    return f"{type(problem).__name__}: {problem}"


def newest_first(*folders: Path, of_runs: bool = True) -> list[Path]:
    """The checkpoints in ``folders``, newest first, damaged ones included.

    Local. These are files and directories with the suffix ``.ckpt``, and other directories with a manifest; with
    ``of_runs`` only those from which a run can be resumed, which have more than weights.
    """
    found: list[tuple[float, Path]] = []
    for path in {path for folder in folders if folder.is_dir() for path in names_in(folder)}:
        place = last_written(path)
        if path.name.startswith(".") or not (path.suffix == ".ckpt" or (place / MANIFEST).is_file()):
            continue
        about = _about(place)
        if not (of_runs and about.get("weights_only")):
            found.append((time_of(path), path))
    return [path for _, path in sorted(found, reverse=True)]


def time_of(path: Path) -> float:
    """Seconds since 1970 at which a checkpoint was saved; local."""
    place = last_written(path)
    try:
        return _about(place).get("time") or place.stat().st_mtime
    except OSError:  # Removed by the program that wrote it.
        return 0.0


def _about(place: Path) -> dict[str, Any]:
    try:
        return describe(place) or {}
    except DamagedCheckpointError:
        return {}


def first_intact(paths: Sequence[Path]) -> Path:
    """Where to read the first of ``paths`` that is not damaged; rank 0 warns of those before it.

    Each rank reads a part of the bytes. What has no hashes must be readable, unless it is the last of them. Rank 0's
    ``paths`` count. Collective over all ranks.

    Raises:
        DamagedCheckpointError: On all ranks, if none is left; it names every bad file.
    """
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    problems: list[str] = []
    places = gather([last_written(path) for path in paths], None)[0]
    for place in places:
        own = together(partial(damages, place, part=rank, num_parts=num_ranks))
        found = gather(own, None)
        bad = list(dict.fromkeys(line for lines in found for line in lines or ()))
        if found[0] is None and place != places[-1]:
            try:
                together(partial(_read_first, place))
            except Exception as problem:
                bad = [f"it has no hashes, and cannot be read: {type(problem).__name__}: {problem}"]
        if not bad:
            if problems:
                _warn("\n".join([*problems, f"Going on from {place}, which is as it was written."]))
            if found[0] is None:
                _warn(
                    f"{place} has no hashes of its files (an earlier version or another program wrote it), so damage "
                    "would not be noticed."
                )
            if place.exists():
                CLOCK.has_seen(describe(place))
            return place
        problems += [f"{place} is damaged:", *(f"  {line}" for line in bad)]
    raise DamagedCheckpointError("\n".join(problems))


def _read_first(path: Path) -> None:
    """Read what every load reads first, the index of shards and the head of a file, without running code; local."""
    if path.is_dir():
        CheckpointReader(path).read_metadata()
    with suppress(pickle.UnpicklingError):  # Objects that need the user's word.
        torch.load(path / "meta.pt" if path.is_dir() else path, mmap=True, map_location="meta", weights_only=True)


def _warn(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        warnings.warn(text, stacklevel=3)
