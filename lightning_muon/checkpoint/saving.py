"""Writes a checkpoint from all ranks, as a directory of shards or as a single file."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_muon.checkpoint.background import BackgroundSaves
from lightning_muon.checkpoint.manifest import CLOCK, HashedFile, ShardWriter, write_file, write_manifest
from lightning_muon.checkpoint.nodes import common_weights, copied, of_first_node
from lightning_muon.checkpoint.staging import README, replacing
from lightning_muon.comm.agreement import await_all_ranks, fail_together, gather, on_first_rank, together
from lightning_muon.comm.groups import AxisGroup
from lightning_muon.config import VERSION
from lightning_muon.optim.gradients import FiniteCheck
from lightning_muon.params.layout import parameters_of
from lightning_muon.params.uses import clean_name
from lightning_muon.pipeline.runtime import is_stage, names_of_copies, place_in_stage, runtime_of
from lightning_muon.sharding.weights import broadcast_buffers

_README_TEXT = """\
A checkpoint of lightning_muon in shards. Trainer(strategy="parallel_muon" or "flexdemo") reads the directory.
load_from_checkpoint, torch.load and other strategies read one file ("Is a directory" otherwise), with the weights:

    lightning-muon convert THIS_DIRECTORY FILE
"""
SKIPPED = "skipped_steps"  # Key in the manifest.
NAMES = "qualified_names"  # Key in a param group of a single file: names of its parameters.
Filters = Mapping[str, Callable[[str, Any], bool]]  # Key -> (name, value) -> whether to write it.


@dataclass
class State:
    """The objects that a program saves or loads, by kind; the program chooses the keys."""

    # Key -> a module and the optimizers that step it.
    modules: dict[str, tuple[nn.Module, Sequence[torch.optim.Optimizer]]] = field(default_factory=dict)
    # Key -> an optimizer and the module that it steps, which comes first.
    optimizers: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)  # Everything else.
    checks: dict[str, FiniteCheck] = field(default_factory=dict)  # Key of an optimizer -> its count of skipped steps.
    about: dict[str, Any] = field(default_factory=dict)  # For the manifest.


def save(
    path: Path,
    state: State,
    mesh: DeviceMesh,
    *,
    filters: Filters,
    metadata_name: str | None,
    saves: BackgroundSaves | None = None,
) -> None:
    """Write a checkpoint; ``mesh`` has the ranks with batches of their own. Collective.

    Arguments as those of :func:`write_checkpoint`.
    """
    whole, offload = metadata_name is None, saves is None
    content: dict[str, Any] = {}
    for key, (module, optimizers) in state.modules.items():
        content[key] = weights_to_save(module, optimizers, mesh, whole=whole, offload=offload)
    for key, (module, optimizer) in state.optimizers.items():
        content[key] = optimizer_state_to_save(module, optimizer, whole=whole, offload=offload)

    def rest() -> dict[str, Any]:
        own = {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state.rest.items()}
        return _filtered(own, filters)

    # An error is raised on all ranks: filters and objects are the program's own, and only rank 0 has whole weights.
    content = together(lambda: _filtered(content, filters))
    about = {**state.about, **skipped_steps(state.checks)}
    write_checkpoint(path, content, together(rest), metadata_name=metadata_name, about=about, saves=saves)


def skipped_steps(checks: Mapping[str, FiniteCheck]) -> dict[str, Any]:
    """Entry of the manifest with the number of skipped steps of each optimizer; local."""
    return {SKIPPED: {key: check.counts for key, check in checks.items()}}


def weights_to_save(
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    mesh: DeviceMesh,
    *,
    whole: bool,
    offload: bool = True,
) -> dict[str, Any]:
    """Return weights that all nodes have in common. Collective over all ranks.

    Without ``offload`` shards stay on the GPU, for callers that copy them.
    """
    broadcast_buffers(module, mesh if is_stage(module) else None)
    with common_weights(optimizers) as differ:
        if whole:
            return copied(full_weights(module)) if differ else full_weights(module)
        state: dict[str, Any] = get_model_state_dict(module, options=StateDictOptions(cpu_offload=offload or differ))
        return of_first_node(state, mesh) if differ else state


def bytes_to_save(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Bytes of whole weights and states of optimizers. Collective over all ranks."""
    states: list[Any] = [get_optimizer_state_dict(module, optimizer)["state"] for optimizer in optimizers]
    every = [get_model_state_dict(module), *(entries for state in states for entries in state.values())]
    values = [value for entries in every for value in entries.values() if isinstance(value, torch.Tensor)]
    return sum(value.numel() * value.element_size() for value in values)


def optimizer_state_to_save(
    module: nn.Module, optimizer: torch.optim.Optimizer, *, whole: bool, offload: bool = True
) -> dict[str, Any]:
    """State by name in shards, or by number on rank 0. Collective over all ranks."""
    options = StateDictOptions(full_state_dict=whole, cpu_offload=whole or offload)
    state: dict[str, Any] = get_optimizer_state_dict(module, optimizer, options=options)
    return numbered_optimizer_state(state, names_in_groups(module, optimizer)) if whole and state else state


def full_weights(module: nn.Module) -> dict[str, Any]:
    """Whole weights on rank 0, under the names of the module, ``_orig_mod`` included. Collective over all ranks."""
    if is_stage(module):
        return _weights_of_stages(module)
    own = {clean_name(name): name for name in module.state_dict()}
    return {own.get(name, name): value for name, value in full_state_dict(module).items()}


def full_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Whole weights and buffers on the CPU on rank 0, an empty dict elsewhere.

    Collective over all ranks, those with other stages of a pipeline too. Names are those of the plain model, without
    what ``torch.compile`` adds; tied weights have all their names and one memory. A module without shards gives its
    ordinary state dict, in a program of several ranks on rank 0 only. As in ``Module.state_dict``, tensors that are
    whole and on the CPU already are not copied: clone them to keep them while training goes on.

    Example::

        state = lightning_muon.full_state_dict(model)  # on every rank
        if torch.distributed.get_rank() == 0:
            torch.save(state, "weights.pt")

    Args:
        module: A sharded model, one of its submodules, or a plain module. Do not pick a submodule with weights that are
            tied to others outside of it right after a forward pass without gradients: FSDP2 leaves such weights whole,
            in the dtype of the computation. (The strategy shards them again after each evaluation step.)
    """
    stage, place = place_in_stage(module)
    if stage is not None or any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        await_all_ranks()
    if stage is not None:
        prefix, whole = f"{place}." if place else "", _weights_of_stages(stage)
        return {clean_name(k.removeprefix(prefix)): value for k, value in whole.items() if k.startswith(prefix)}
    state = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    first_names: dict[int, str] = {}
    # After the gather, which also reshards weights that a forward pass has left whole.
    named = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    for name, tensor in ((clean_name(name), tensor) for name, tensor in named):
        if name in state:
            state[name] = state[first_names.setdefault(id(tensor), name)]
    return state  # type: ignore[return-value]


def _weights_of_stages(module: nn.Module) -> dict[str, Any]:
    """Weights of all stages on rank 0, sent tensor by tensor; copies of a tied weight are one tensor there."""
    group, state = runtime_of(module).group, module.state_dict()
    described = {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
    }
    listed, whole = gather((described, names_of_copies(module)), group), dict[str, Any]()
    is_first_data_rank = dist.get_process_group_ranks(group.group)[0] == 0 if group.group is not None else True
    for stage, (entries, _) in enumerate(listed):
        for name, entry in entries.items():
            value = entry
            if isinstance(entry, torch.Tensor) and stage == group.rank:
                value = state[name].full_tensor() if isinstance(state[name], DTensor) else state[name]
                if stage > 0 and is_first_data_rank:
                    dist.send(value.contiguous(), group=group.group, group_dst=0)
            elif isinstance(entry, torch.Tensor) and group.rank == 0 and is_first_data_rank:
                value = torch.empty(entry.shape, dtype=entry.dtype, device=runtime_of(module).stages.device)
                dist.recv(value, group=group.group, group_src=stage)
            if dist.get_rank() == 0:
                whole[name] = value.cpu() if isinstance(value, torch.Tensor) else value
    for _, copies in listed if dist.get_rank() == 0 else ():
        whole |= {copy: whole[name] for copy, name in copies.items()}
    return whole


def numbered_optimizer_state(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Convert a state by name to one by position, as in ``state_dict()``; ``names`` are in order of the param groups.

    Each group also gets the names, which a stage of a pipeline needs.
    """
    numbers = {name: index for index, name in enumerate(names)}
    groups = [
        {**group, "params": [numbers[name] for name in group["params"]], NAMES: list(group["params"])}
        for group in state["param_groups"]
    ]
    return {"state": {numbers[name]: value for name, value in state["state"].items()}, "param_groups": groups}


def names_in_groups(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the parameters, in the order of the param groups."""
    names = {parameter: clean_name(name) for name, parameter in module.named_parameters()}
    return [names[parameter] for parameter in parameters_of(optimizer)]


def write_checkpoint(
    path: Path,
    content: Mapping[str, Any],
    rest: Mapping[str, Any],
    *,
    metadata_name: str | None,
    about: Mapping[str, Any] | None = None,
    saves: BackgroundSaves | None = None,
) -> None:
    """Write a checkpoint instead of what is at ``path``. Collective over all ranks.

    The ``rest`` of rank 0 goes to the file ``metadata_name`` beside the shards, or without it to one file with
    everything. ``about`` goes to the manifest. With ``saves`` all is copied, and written while the program goes on.
    """
    # False for a Trainer that saves only weights.
    is_whole_run = "loops" in rest or "global_step" not in rest
    about = describe_save(**(about or {}), step=rest.get("global_step"), weights_only=not is_whole_run)

    def write(state: tuple[dict[str, Any], dict[str, Any]], everyone: AxisGroup | None) -> None:
        content, rest = state
        with replacing(path, whole=metadata_name is None, everyone=everyone) as (draft,):
            if metadata_name is None:
                on_first_rank(lambda: write_file({**content, **rest}, draft, about), everyone)
                return
            beside: dict[str, Callable[[Any], Any]] = {metadata_name: partial(torch.save, rest)}
            if "state_dict" in content:  # A Trainer's, which `lightning-muon convert` reads.
                beside[README] = lambda file: file.write(_README_TEXT.encode())
            write_shards(content, draft, about, beside, everyone=everyone)

    state = dict(content), dict(rest) if dist.get_rank() == 0 else {}
    if saves is None:
        write(state, None)
    else:
        saves.start(path, state, write)


def describe_save(**more: Any) -> dict[str, Any]:
    """Facts for the manifest, beside files; the same for all that one save writes. Collective over all ranks."""
    own = {"lightning_muon": VERSION, "torch": torch.__version__, "num_ranks": dist.get_world_size()}
    found = [{"save": uuid.uuid4().hex, "time": CLOCK.now(), **own, **more}]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def write_shards(
    content: Mapping[str, Any],
    directory: Path,
    about: Mapping[str, Any],
    beside: Mapping[str, Callable[[HashedFile], Any]] | None = None,
    *,
    everyone: AxisGroup | None = None,
) -> None:
    """Write the shards of each rank, then files of rank 0 ``beside`` them, and at last the manifest.

    ``beside`` maps names of files to functions that write them. A thread gives ``everyone``, all ranks with a process
    group of its own. Collective over all ranks.
    """
    writer, files = ShardWriter(directory), dict[str, Any]()

    def write_beside() -> None:
        directory.mkdir(exist_ok=True)
        for name, write in (beside or {}).items():
            with HashedFile(directory / name) as file:
                write(file)
            files[name] = file.entry

    on_first_rank(write_beside, everyone)
    try:
        group = None if everyone is None else everyone.group
        dcp_save(dict(content), storage_writer=writer, process_group=group)
    except CheckpointException as problem:  # On all ranks. Not a subclass of Exception.
        fail_together(writer.error, everyone)
        raise RuntimeError(f"shards could not be written to {directory}: {problem}") from problem
    for entries in gather(writer.entries, everyone):
        files |= entries
    on_first_rank(lambda: write_manifest(directory, files, about), everyone)


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
