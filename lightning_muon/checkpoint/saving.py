"""Writes a checkpoint from all ranks, as a directory of shards or as a single file.

While the training goes on, a thread writes a copy of the state in host memory.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion

from lightning_muon.checkpoint.manifest import CLOCK, HashedFile, ShardWriter, write_file, write_manifest
from lightning_muon.checkpoint.staging import replacing
from lightning_muon.comm.agreement import await_all_ranks, fail_together, gather, on_first_rank, together
from lightning_muon.comm.collectives import AxisGroup, axis_group
from lightning_muon.config import VERSION
from lightning_muon.flexdemo.optimizer import FlexDeMo
from lightning_muon.flexdemo.replicators import LocalSteps
from lightning_muon.params.layers import clean_name
from lightning_muon.params.layout import local_tensor, parameters_of
from lightning_muon.pipeline.runtime import is_stage, names_of_copies, place_in_stage, runtime_of
from lightning_muon.sharding.base import broadcast, broadcast_buffers, joined_state_dicts, mesh_device

_MOST_OF_ONE_FILE = 2 * 2**30  # Bytes of a checkpoint, with save_distributed_checkpoint="auto".
NAMES = "qualified_names"  # Key in a param group of a single file: names of its parameters.
Filters = Mapping[str, Callable[[str, Any], bool]]  # Key -> (name, value) -> whether to write it.


@dataclass(frozen=True, eq=False)
class Weights:
    """The part of a checkpoint that has the weights of a module, which ``optimizers`` step."""

    module: nn.Module
    mesh: DeviceMesh  # The ranks with batches of their own.
    optimizers: Sequence[torch.optim.Optimizer] = ()


@dataclass(frozen=True, eq=False)
class OptimizerState:
    """The part of a checkpoint that has the state of an optimizer, which steps ``module``."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    is_by_name: bool = False  # In a file, too, where parameters have numbers else, as in `Optimizer.state_dict`.


# What a program saves or loads under keys that it chooses: weights, states of optimizers, anything else.
Parts = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a checkpoint is written."""

    whole: bool  # As one file in place of a directory of shards.
    metadata_name: str | None = None  # In the directory, the file with all that is no weight and no state.
    about: Mapping[str, Any] = field(default_factory=dict)  # For the manifest.
    saves: BackgroundSaves | None = None  # With it all is copied, and written while the program goes on.


def save(places: Mapping[Path, Parts], how: Format, filters: Filters | None = None) -> None:
    """Write checkpoints in place of what is there, all or none of them. Collective over all ranks.

    A part under the key ``""`` is all that its file has.
    """
    collected: dict[Path, Content] = {}
    for path, parts in places.items():
        states = {key: collect(part, how) for key, part in parts.items() if isinstance(part, Weights | OptimizerState)}
        others = {key: part for key, part in parts.items() if key not in states}
        # An error is raised on all ranks: filters and objects are the program's own, and only rank 0 has whole weights.
        collected[path] = together(partial(_chosen, states, others, filters or {}))
    write(collected, how)


def collect(part: Weights | OptimizerState, how: Format) -> dict[str, Any]:
    """Shards of a part, states by the names of parameters; or on rank 0 all of it. Collective over all ranks."""
    offload = how.saves is None  # A thread copies shards from a GPU by itself.
    if isinstance(part, Weights):
        return _weights(part, whole=how.whole, offload=offload)
    options = StateDictOptions(full_state_dict=how.whole, cpu_offload=how.whole or offload)
    state: dict[str, Any] = get_optimizer_state_dict(part.module, part.optimizer, options=options)
    if not how.whole or not state or part.is_by_name:
        return state
    # By position, as in `Optimizer.state_dict`. A stage of a pipeline needs the names, too.
    numbers = {name: number for number, name in enumerate(names_in_groups(part.module, part.optimizer))}
    groups = [
        {**group, "params": [numbers[name] for name in group["params"]], NAMES: list(group["params"])}
        for group in state["param_groups"]
    ]
    return {"state": {numbers[name]: value for name, value in state["state"].items()}, "param_groups": groups}


@joined_state_dicts()
def _weights(part: Weights, *, whole: bool, offload: bool) -> dict[str, Any]:
    """Weights that all nodes have in common. Collective over all ranks."""
    module, mesh, alone = part.module, part.mesh, training_alone(part.optimizers)
    broadcast_buffers(module, mesh if is_stage(module) else None)
    with ExitStack() as stack:
        for optimizer in alone:
            stack.enter_context(optimizer.common_weights())
        state: dict[str, Any]
        if not whole:
            state = get_model_state_dict(module, options=StateDictOptions(cpu_offload=offload or bool(alone)))
            return _of_first_node(state, mesh) if alone else state
        if is_stage(module):
            state = _weights_of_stages(module)
        else:
            own = {clean_name(name): name for name in module.state_dict()}  # With `_orig_mod`.
            state = {own.get(name, name): value for name, value in full_state_dict(module).items()}
        return _copied(state) if alone else state


def training_alone(optimizers: Sequence[torch.optim.Optimizer]) -> list[FlexDeMo]:
    """The optimizers whose nodes train by themselves and have taken a step, so that weights may differ; local.

    One set of weights is evaluated and saved, never a mixture.
    """
    flexdemo = [each for each in optimizers if isinstance(each, FlexDeMo) and each.num_exchanges]
    return [each for each in flexdemo if isinstance(each.config.replicator, LocalSteps)]


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Clone the weights, tied ones once; local."""
    tensors = {id(value): value for value in state.values() if isinstance(value, Tensor)}
    copies = {key: value.detach().clone() for key, value in tensors.items()}
    return {name: copies.get(id(value), value) for name, value in state.items()}


def _of_first_node(state: Mapping[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    """Copies of the weights of the first node of ``mesh``. Collective over the nodes."""
    nodes = axis_group(mesh, (0,))
    copies = _copied(state)
    if nodes.group is not None:
        tensors = {id(value): value for value in copies.values() if isinstance(value, Tensor)}
        broadcast(list(map(local_tensor, tensors.values())), nodes.group, mesh_device(mesh))
    return copies


def whole_on_first_rank(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors on the CPU of rank 0, none elsewhere. Collective over all ranks."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if dist.get_rank() == 0:
            found[name] = whole.cpu()
    return found


def fits_one_file(module: nn.Module, num_states: int) -> bool:
    """Whether weights, and so many states of their size, are few bytes for a single file; local, alike on all ranks."""
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    return (1 + num_states) * num_bytes < _MOST_OF_ONE_FILE


@joined_state_dicts()
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


@joined_state_dicts()
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


def names_in_groups(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the parameters, in the order of the param groups."""
    names = {parameter: clean_name(name) for name, parameter in module.named_parameters()}
    return [names[parameter] for parameter in parameters_of(optimizer)]


# What goes into a checkpoint: states by key, of which each rank has its shards, or rank 0 all; and the rest, of rank 0.
Content = tuple[Mapping[str, Any], Mapping[str, Any]]


def write(places: Mapping[Path, Content], how: Format) -> None:
    """Write what was collected in place of what is there, all or none of it. Collective over all ranks."""
    about, is_first = describe_save(**how.about), dist.get_rank() == 0
    state = {path: (dict(states), dict(rest) if is_first else {}) for path, (states, rest) in places.items()}

    def run(state: Mapping[Path, Content], everyone: AxisGroup | None) -> None:
        with ExitStack() as stack:
            for path, (states, rest) in state.items():
                draft = stack.enter_context(replacing(path, whole=how.whole, everyone=everyone))
                if how.whole:
                    content = {**states, **rest}
                    on_first_rank(partial(write_file, content.get("", content), draft, about), everyone)
                    continue
                beside = {} if how.metadata_name is None else {how.metadata_name: rest}
                write_shards(states, draft, about, beside, everyone=everyone)

    if how.saves is None:
        run(state, None)
    else:
        how.saves.start(next(iter(places)), state, run)


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
    beside: Mapping[str, Any] | None = None,
    *,
    everyone: AxisGroup | None = None,
) -> None:
    """Write the shards of each rank, then files of rank 0 ``beside`` them, and at last the manifest.

    ``beside`` maps names of files to what is in them. A thread gives ``everyone``, all ranks with a process group of
    its own. Collective over all ranks.
    """
    writer, files = ShardWriter(directory), dict[str, Any]()

    def write_beside() -> None:
        directory.mkdir(exist_ok=True)
        for name, value in (beside or {}).items():
            with HashedFile(directory / name) as file:
                torch.save(value, cast("IO[bytes]", file))
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


def _chosen(states: Mapping[str, Any], others: Mapping[str, Any], filters: Filters) -> Content:
    rest = {key: part.state_dict() if isinstance(part, Stateful) else part for key, part in others.items()}
    return _filtered(states, filters), _filtered(rest, filters)


def _filtered(content: Mapping[str, Any], filters: Filters) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in content.items():
        if key not in filters:
            result[key] = value
        elif isinstance(value, Mapping):
            result[key] = {name: item for name, item in value.items() if filters[key](name, item)}
        elif filters[key](key, value):
            result[key] = value
    return result


THREAD = "lightning_muon_save"
_log = logging.getLogger(__name__)


class BackgroundSaves:
    """Writes checkpoints in a thread, one at a time, which communicates with other ranks' threads over ``ranks``.

    ``ranks`` are all ranks with a process group of its own, since the training goes on over others. An error
    of a thread is raised on all ranks by the next :meth:`start` or :meth:`finish`, and logged at once. The thread keeps
    the process alive until its checkpoint is written.
    """

    def __init__(self, ranks: AxisGroup) -> None:
        self._ranks, has_card = ranks, torch.accelerator.is_available()
        self._options = StagingOptions(
            use_pinned_memory=has_card,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=has_card,
        )
        self._stager = DefaultStager(self._options)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._afterwards: list[Callable[[], None]] | None = None  # `None` when nothing is being written.

    def start(self, path: Path, state: Any, write: Callable[[Any, AxisGroup], None]) -> None:
        """Call ``write`` in a thread with a copy of ``state``, after the save that runs; ``path`` is for errors.

        ``write`` is collective over the ranks that it is given, and fails on all of them or on none. Collective over
        all ranks.
        """
        self.finish()
        is_agreed = threading.Event()

        def start() -> threading.Thread:
            arguments = path, partial(write, self._copied(state), self._ranks), is_agreed
            thread = threading.Thread(target=self._run, args=arguments, name=THREAD)
            thread.start()
            return thread

        try:
            thread = together(start, (self._ranks,))
            self._thread, self._afterwards = thread, []
        finally:
            is_agreed.set()

    def _copied(self, state: Any) -> Any:
        """A copy in host memory; from torch 2.13 on in that of the last copy."""
        if TorchVersion(torch.__version__) < "2.13":  # Such a stager makes one copy.
            self._stager = DefaultStager(self._options)
        return self._stager.stage(state)

    def after_commit(self, action: Callable[[], None]) -> None:
        """Call ``action`` when the running save has succeeded; at once, if there is none. Local."""
        with self._lock:
            if self._afterwards is not None:
                self._afterwards.append(action)
                return
        if self._error is None:
            action()

    def finish(self) -> None:
        """Wait until all is written; raise if it has failed. Collective over all ranks."""
        if self._thread is None:
            return
        self._thread.join()
        error, self._thread, self._error = self._error, None, None
        if error is not None and not isinstance(error, Exception):
            error = RuntimeError(f"{type(error).__name__}: {error}")
        fail_together(error, self._ranks)

    def give_up(self) -> None:
        """Wait for the running save, without raising its error, which is logged; for a run that has failed. Local."""
        if self._thread is not None:
            self._thread.join()
        self._thread = self._error = None

    def _run(self, path: Path, write: Callable[[], None], is_agreed: threading.Event) -> None:
        """Body of the thread."""
        is_agreed.wait()
        if self._thread is not threading.current_thread():  # Another rank could not start its own.
            return
        what = f"{path} could not be written"
        try:
            write()
            what = f"{path} was written, but a checkpoint before it could not be removed"
            while (action := self._next_action()) is not None:
                action()
        except BaseException as error:
            error.add_note(f"{what} beside the training (async_save=True).")
            self._error = error
            _log.error("%s: %s: %s", what, type(error).__name__, error)
            with self._lock:
                self._afterwards = None

    def _next_action(self) -> Callable[[], None] | None:
        with self._lock:
            if self._afterwards:
                return self._afterwards.pop(0)
            self._afterwards = None
            return None
