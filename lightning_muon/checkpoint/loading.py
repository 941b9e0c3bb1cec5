"""Reads a checkpoint: a directory of shards, or a single file in the format of a program with one process."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.stateful import Stateful

from lightning_muon.checkpoint.manifest import describe
from lightning_muon.checkpoint.newest import first_intact
from lightning_muon.checkpoint.nodes import zeros_of_nodes
from lightning_muon.checkpoint.saving import NAMES, SKIPPED, State, names_in_groups
from lightning_muon.comm.agreement import fail_together, gather, together
from lightning_muon.compat.torch import CheckpointReader
from lightning_muon.flexdemo.optimizer import FlexDeMo
from lightning_muon.optim.gradients import FiniteCheck
from lightning_muon.optim.parameters import (
    ADAMW_STATE,
    MUON_STATE,
    SECOND_MOMENT,
    warn_of_new_second_moments,
)
from lightning_muon.optim.planned_optimizer import PlannedOptimizer
from lightning_muon.optim.saved_states import are_ours, understood
from lightning_muon.params.uses import clean_name
from lightning_muon.pipeline.runtime import group_of, is_stage, names_of_copies
from lightning_muon.removed import STATE_OF
from lightning_muon.sharding.units import original_class

_NUM_SHOWN = 4  # Names of each kind in an error.


class Checkpoint:
    """A checkpoint that is being read; ``content`` is that of the single file, or of the file beside the shards."""

    # Advice if weights do not fit, or the state of an optimizer.
    weights_advice = "strict=False loads what fits"
    state_advice = "load without {key!r}"

    def __init__(
        self, path: Path, content: dict[str, Any], *, is_sharded: bool, weights_only: bool | None = None
    ) -> None:
        self.path, self.content, self.is_sharded = path, content, is_sharded
        self._weights_only = weights_only

    @classmethod
    def open(cls, *paths: Path, metadata_name: str, weights_only: bool | None) -> Self:
        """Read the first of ``paths`` that is not damaged, but no shards: ``metadata_name`` marks a directory of them.

        Collective.
        """
        path = first_intact(paths)

        def look() -> bool:
            if not path.is_file() and not (path / metadata_name).is_file():
                raise FileNotFoundError(
                    f"{path} is no checkpoint: every rank must see a file, or a directory with {metadata_name}, there"
                )
            return path.is_dir()

        is_sharded = together(look)

        def read() -> dict[str, Any]:
            file = path / metadata_name if is_sharded else path
            return torch.load(file, mmap=not is_sharded, map_location="cpu", weights_only=weights_only)

        content = together(read)
        if not isinstance(content, dict):
            raise TypeError(f"{path} is no checkpoint: it has a {type(content).__name__} in place of a dict")
        return cls(path, content, is_sharded=is_sharded, weights_only=weights_only)

    @property
    def reader(self) -> CheckpointReader:
        """What reads the shards."""
        return CheckpointReader(self.path, weights_only=self._weights_only)

    def whole(self, key: str) -> Any:
        """The content of the single file under a key that is also used for shards."""
        return self.content[key]

    def load_weights(self, key: str, module: nn.Module, *, strict: bool) -> None:
        """Fill a module from what was saved under ``key``. Collective over all ranks."""
        if self.is_sharded:
            state = {key: get_model_state_dict(module)}
            sizes = {clean_name(name): getattr(value, "shape", None) for name, value in state[key].items()}
            saved = together(lambda: self._sizes_of_shards(f"{key}."))
            self._check_weights(key, module, sizes, saved, strict=strict)
            planner = DefaultLoadPlanner(allow_partial_load=not strict)
            try:
                load(state, storage_reader=self.reader, planner=planner)
            except CheckpointException as problem:  # On all ranks. Not a subclass of Exception.
                raise RuntimeError(f"{key!r} in {self.path} cannot be read: {_first_failure(problem)}") from None
            set_model_state_dict(module, state[key], options=StateDictOptions(strict=strict))
            return
        weights = {clean_name(name): value for name, value in self.whole(key).items()}
        own = {clean_name(name): getattr(value, "shape", None) for name, value in module.state_dict().items()}
        saved = {name: getattr(value, "shape", None) for name, value in weights.items()}
        self._check_weights(key, module, own, saved, strict=strict)
        # Stages of a pipeline have different weights, which each takes from the file.
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=not is_stage(module), strict=False)
        set_model_state_dict(module, {name: weights[name] for name in weights if name in own}, options=options)

    def load_optimizer(self, key: str, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Fill an optimizer, which steps ``module``, from ``key``. Collective."""
        error: Exception | None = None
        try:
            (self._load_shards if self.is_sharded else self._load_whole)(key, module, optimizer)
        except (KeyError, ValueError, RuntimeError, CheckpointException) as problem:
            error = RuntimeError(
                f"the state {key!r} in {self.path} does not fit {type(optimizer).__name__}: it was saved with another "
                "optimizer, other options, other param groups or another model. To go on with the weights alone, "
                f"{self.state_advice.format(key=key)}. ({_first_failure(problem)})"
            )
        fail_together(error, None)

    def load_skipped_steps(self, checks: Mapping[str, FiniteCheck]) -> None:
        """Restore the counts of skipped steps that were saved with each optimizer; local."""
        saved = (describe(self.path) or {}).get(SKIPPED, {})
        for key in checks.keys() & saved.keys():
            checks[key].counts = tuple(saved[key])

    def load(self, state: State, target: dict[str, Any], *, strict: bool) -> dict[str, Any]:
        """Load everything that ``state`` names, and return the rest of the checkpoint, without shards.

        Values without ``load_state_dict`` go into ``target``. Collective over all ranks.
        """
        absent = self._absent(state, strict=strict)
        for key, (module, _) in state.modules.items():
            if key not in absent:
                self.load_weights(key, module, strict=strict)
        for key, (module, optimizer) in state.optimizers.items():
            if key not in absent:
                self.load_optimizer(key, module, optimizer)
        self.load_skipped_steps({key: check for key, check in state.checks.items() if key not in absent})
        for key, value in state.rest.items():
            if key in absent:
                continue
            if isinstance(value, Stateful):
                value.load_state_dict(self.content.pop(key))
            else:
                target[key] = self.content.pop(key)
        return {key: value for key, value in self.content.items() if key not in state.modules | state.optimizers}

    def _sizes_of_shards(self, prefix: str) -> dict[str, Any]:
        """Name -> size of each saved tensor under ``prefix``, ``None`` for other values; local."""
        saved: Any = self.reader.read_metadata().state_dict_metadata
        sizes: dict[str, Any] = {}
        for name, entry in saved.items():
            if name.startswith(prefix):
                stem, mark, _ = name.removeprefix(prefix).partition("_extra_state")  # It may have entries of its own.
                sizes[stem + mark] = getattr(entry, "size", None)
        return sizes

    def _optimizer_in_shards(self, key: str) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
        """Sizes of the entries of each parameter's state, and of each param group by its number; local."""
        sizes, groups = dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
        for name, size in self._sizes_of_shards(f"{key}.").items():
            part, _, rest = name.partition(".")
            if part == "state":
                parameter, entry = rest.rsplit(".", 1)
                sizes.setdefault(parameter, {})[entry] = size
            elif part == "param_groups":
                number, _, option = rest.partition(".")
                groups.setdefault(number, {})[option] = size
        return sizes, groups

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
        advice = ["Give the path of a checkpoint of this model, or build the model that was saved"]
        if not differing["of another size"]:
            advice += [self.weights_advice] if self.weights_advice else []
            if self.is_sharded and key == "state_dict":
                advice.append("lightning-muon convert DIR FILE writes one file, in which names can be changed")
        name = original_class(getattr(module, "_orig_mod", module)).__name__
        text = "\n".join([f"{key!r} in {self.path} does not fit {name}:", *lines, f"{'; '.join(advice)}."])
        fail_together(RuntimeError(text), stages)

    def _load_shards(self, key: str, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        own: Any = get_optimizer_state_dict(module, optimizer)
        saved, saved_groups = self._optimizer_in_shards(key)
        sizes = {name: {k: size for k, size in entries.items() if k not in STATE_OF} for name, entries in saved.items()}
        own_groups = own["param_groups"]
        if len(saved_groups) != len(own_groups):
            raise ValueError(f"{len(saved_groups)} param groups in the checkpoint, {len(own_groups)} here")
        # A copy of a parameter of another stage takes the state of that one, if the checkpoint has no copies.
        originals = {copy: name for copy, name in names_of_copies(module).items() if copy not in sizes}
        of_now: dict[str, dict[str, Any]] = own["state"]
        needed = {originals.get(name, name): state for name, state in of_now.items()}
        needed = _without_new_second_moments(sizes, needed)
        to_muon, to_adamw = _moved(sizes, needed)
        _check_entries(sizes, {name: state for name, state in needed.items() if name not in {*to_muon, *to_adamw}})
        states = needed | {name: {"exp_avg": needed[name]["momentum_buffer"]} for name in to_muon}
        states |= {name: {k: torch.zeros_like(v) for k, v in needed[name].items()} for name in to_adamw}
        for name, state in states.items():
            for entry in state.keys() & _of_nodes(optimizer):
                size = sizes[name][entry]
                if size[0] != state[entry].shape[0]:
                    state[entry] = zeros_of_nodes(state[entry], size)
        # Not the names of parameters, which are those of one stage.
        groups = [{k: value for k, value in group.items() if k != "params"} for group in own_groups]
        is_planned = isinstance(optimizer, PlannedOptimizer)
        if is_planned:  # All that was saved, maybe by another optimizer.
            for number, group in enumerate(groups):
                options = saved_groups[str(number)].items()
                groups[number] = {k: group.get(k) for k, size in options if k in group or size is None}
        # Keys of the groups may be new, for example those of a scheduler that was added since.
        planner = DefaultLoadPlanner(allow_partial_load=True)
        load({key: {"state": states, "param_groups": groups}}, storage_reader=self.reader, planner=planner)
        if is_planned:
            gone = {name: {k: entries[k] for k in entries if k in STATE_OF} for name, entries in saved.items()}
            groups = understood({"state": gone, "param_groups": groups})["param_groups"]
        both = zip(own_groups, groups, strict=True)
        own["param_groups"] = [{**mine, **group, "params": mine["params"]} for mine, group in both]
        for name in to_muon:
            states[name] = {"momentum_buffer": states[name]["exp_avg"]}
        for name in of_now:
            of_now[name] = _cloned(states[originals[name]]) if name in originals else states[name]
        with _all_trained(module, of_now):
            set_optimizer_state_dict(module, optimizer, own)

    def _load_whole(self, key: str, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        whole = self.whole(key)
        is_foreign = isinstance(optimizer, PlannedOptimizer) and not are_ours(whole["param_groups"])
        if isinstance(optimizer, PlannedOptimizer):
            whole = understood(whole)
        named = named_optimizer_state(whole, module, optimizer)
        # The state that the optimizer would save; nothing if it creates state at its first step.
        own: Any = get_optimizer_state_dict(module, optimizer)["state"] if optimizer.state else {}
        to_muon, to_adamw = _moved(named["state"], own)
        for name in to_muon:
            named["state"][name] = {"momentum_buffer": named["state"][name]["exp_avg"]}
        for name in to_adamw:
            del named["state"][name]
        if to_adamw or is_foreign:
            _begin_others(named["state"], own)
        _begin_second_moments(named["state"], own)
        _check_entries(named["state"], own)
        # torch broadcasts tensors in the current sizes, so the saved ones must be equal. All ranks have the file.
        are_as_before = all(
            named["state"][name][entry].shape[0] == state[entry].shape[0]
            for name, state in own.items()
            for entry in state.keys() & _of_nodes(optimizer)
        )
        values = chain.from_iterable(entries.values() for entries in named["state"].values())
        has_tensors = any(
            isinstance(value, torch.Tensor) and value.ndim for value in values
        )  # torch asks for their device.
        from_first = has_tensors and are_as_before and not is_stage(module)
        options = StateDictOptions(full_state_dict=has_tensors, broadcast_from_rank0=from_first)
        with _all_trained(module, named["state"]):
            set_optimizer_state_dict(module, optimizer, named, options=options)

    def _absent(self, state: State, *, strict: bool) -> set[str]:
        """Keys of ``state`` that the checkpoint lacks; raise if ``strict`` or if it has none of them, else warn."""
        places = self.reader.read_metadata().planner_data if self.is_sharded else None
        sharded = {place[0] for place in (places or {}).values()}
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


def named_optimizer_state(
    state: Mapping[str, Any], module: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Inverse of :func:`numbered_optimizer_state`; a state by names is returned as it is.

    A file without names, or with those of another model, has the parameters of ``optimizer`` in their order.
    """
    saved, ours = state["param_groups"], optimizer.param_groups
    if any(isinstance(name, str) for group in saved for name in group["params"]):
        return dict(state)
    remaining = iter(names_in_groups(module, optimizer))
    own_names = [[next(remaining) for _ in group["params"]] for group in ours]
    names = [group.get(NAMES, ()) for group in saved]
    renamed = {copy: name for copy, name in names_of_copies(module).items() if copy not in set(chain(*names))}
    pairs = zip_longest(own_names, names, fillvalue=())
    if not all({renamed.get(name, name) for name in own} <= set(known) for own, known in pairs):
        names = own_names
    sizes, wanted = ([len(group["params"]) for group in saved], list(map(len, names)))
    if sizes != wanted:
        raise ValueError(f"the checkpoint has param groups of {sizes} parameters, the optimizer of {wanted}")
    numbers = chain.from_iterable(group["params"] for group in saved)
    states = {name: state["state"][n] for n, name in zip(numbers, chain(*names), strict=True) if n in state["state"]}
    states |= {copy: _cloned(states[name]) for copy, name in renamed.items() if name in states}
    groups = [{**group, **old, "params": params} for group, old, params in zip(ours, saved, own_names, strict=True)]
    for group in groups:
        group.pop(NAMES, None)
    return {"state": states, "param_groups": groups}


@contextmanager
def _all_trained(module: nn.Module, states: Collection[str]) -> Generator[None]:
    """Context in which all parameters with a state require gradients: torch leaves out states of others. Local."""
    frozen = [p for name, p in module.named_parameters() if not p.requires_grad and clean_name(name) in states]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _first_failure(problem: BaseException) -> str:
    """The error in one line, without the tracebacks of all ranks that torch adds."""
    if isinstance(problem, CheckpointException) and problem.failures:
        problem = next(iter(problem.failures.values()))[0]
    return f"{type(problem).__name__}: {problem}"


def _cloned(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Clone a state: two parameters of this rank must not share one."""
    return {entry: value.clone() if isinstance(value, torch.Tensor) else value for entry, value in entries.items()}


def _begin_others(states: dict[str, Any], own: Mapping[str, Mapping[str, Any]]) -> None:
    """Add zeros for parameters without a saved state, which had no gradient with the optimizer that saved."""
    for name, state in own.items():
        if name not in states:
            states[name] = {entry: torch.zeros(value.shape, dtype=value.dtype) for entry, value in state.items()}


def _without_new_second_moments(
    saved: Mapping[str, Iterable[str]], own: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Leave out second moments of NorMuon that the checkpoint lacks: they begin with zeros, with a warning."""
    return {
        name: {entry: state[entry] for entry in state if entry != SECOND_MOMENT or entry in saved.get(name, ())}
        for name, state in own.items()
    }


def _begin_second_moments(states: dict[str, Any], own: Mapping[str, Mapping[str, Any]]) -> None:
    """Add zeros for missing second moments of NorMuon, whose current values torch would keep."""
    missing = [name for name in own if SECOND_MOMENT in own[name] and SECOND_MOMENT not in states.get(name, own[name])]
    for name in missing:
        states[name] = {**states[name], SECOND_MOMENT: torch.zeros(own[name][SECOND_MOMENT].shape)}
    if missing:
        warn_of_new_second_moments()


def _moved(saved: Mapping[str, Iterable[str]], own: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Matrices that were saved on AdamW and run on Muon, and the other way round; with a warning."""
    to_muon: list[str] = []
    to_adamw: list[str] = []
    for name, state in own.items():
        was, now = set(saved.get(name, ())) - {SECOND_MOMENT}, state.keys() - {SECOND_MOMENT}
        if was == ADAMW_STATE and now == MUON_STATE:
            to_muon.append(name)
        elif was == MUON_STATE and now == ADAMW_STATE:
            to_adamw.append(name)
    texts = {
        "from AdamW to Muon: their first moments go on as momenta": to_muon,
        "from Muon to AdamW: their moments begin with zeros": to_adamw,
    }
    for text, names in texts.items():
        if names and dist.get_rank() == 0:
            warnings.warn(f"{len(names)} matrices ({names[0]}, ...) moved {text}", stacklevel=3)
    return to_muon, to_adamw


def _check_entries(saved: Mapping[str, Iterable[str]], own: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ``ValueError`` for missing or additional entries, which torch would ignore."""
    for name, state in own.items():
        there = set(saved.get(name, ()))
        # Optimizers that create state at their first step, and parameters that are frozen now, have none.
        if state and set(state) != there:
            raise ValueError(
                f"{name} has {sorted(state)} here, but {sorted(there)} in the checkpoint: only here "
                f"{sorted(state.keys() - there) or 'nothing'}, only there {sorted(there - state.keys()) or 'nothing'}"
            )


def _of_nodes(optimizer: torch.optim.Optimizer) -> Collection[str]:
    """State entries with a part for each node, which the optimizer converts for another number of nodes."""
    return optimizer.per_node if isinstance(optimizer, FlexDeMo) else ()
