"""The states that an Accelerator saves and loads: the directories and files that Accelerate uses for FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import StateDictType

from lightning_muon.checkpoint.loading import Checkpoint
from lightning_muon.checkpoint.manifest import require_one_save
from lightning_muon.checkpoint.newest import time_of
from lightning_muon.checkpoint.saving import OptimizerState, Weights
from lightning_muon.checkpoint.staging import discard, last_written
from lightning_muon.comm.agreement import (
    fail_together,
    gather,
    on_first_rank,
    require_equal,
    together,
    warn_on_first_rank,
)
from lightning_muon.compat.accelerate import in_place_of_states, prepared_models
from lightning_muon.engine.session import Session
from lightning_muon.engine.training import TrainingEngine
from lightning_muon.params.uses import parameter_uses

_STOCK = "model.safetensors", "pytorch_model.bin"  # What Accelerate calls a model that it has not sharded.


def save_state(accelerator: Any, session: Session, stock: Callable[[], Any]) -> Any:
    """Call ``stock``, Accelerate's ``save_state``; we write models and optimizers. Collective over all ranks."""
    if not accelerator.sync_gradients:
        text = "save_state inside of an accumulated batch: the gradients of its micro-batches are in no checkpoint; "
        warn_on_first_rank(f"{text}call it where accelerator.sync_gradients is true", stacklevel=3)
    session.finish_saving()  # Accelerate may remove older states.
    engine, plugin = session.engines[0], getattr(accelerator.state, "fsdp_plugin", None)
    whole = plugin is not None and plugin.state_dict_type == StateDictType.FULL_STATE_DICT
    if plugin is None or accelerator.options.save_distributed_checkpoint != "auto":
        whole = whole or session.saves_one_file

    def write(directory: str, with_model: bool) -> None:
        chosen = [with_model]
        dist.broadcast_object_list(chosen, src=0)  # Hooks write, and take what they have written, on rank 0 only.
        write_states(session, Path(directory), whole=whole, with_model=chosen[0])

    def weights() -> Sequence[Any]:
        return () if engine.divides_weights else [accelerator.get_state_dict(engine.module)]

    return _among_hooks(accelerator, "save", stock, write, weights)


def _states(engine: TrainingEngine, *, with_model: bool) -> list[tuple[str, int, str, Weights | OptimizerState]]:
    """Each state: Accelerate's name and number of it with FSDP2, its key in a directory, and what it is of; local."""
    model = [("pytorch_model_fsdp", 0, "model", engine.weights)] if with_model else []
    states = [OptimizerState(engine.module, optimizer, is_by_name=True) for optimizer in engine.optimizers]
    return [*model, *(("optimizer", index, "optimizer", state) for index, state in enumerate(states))]


def write_states(session: Session, directory: Path, *, whole: bool, with_model: bool) -> None:
    """Write them in the places of what is there. Collective over all ranks."""
    places, others = dict[Path, dict[str, Any]](), list[Path]()
    for name, index, key, part in _states(session.engines[0], with_model=with_model):
        both = _paths(directory, name, index)
        places[both[whole]] = {"" if whole else key: part}
        others.append(both[not whole])
    if session.saves is not None:
        there = [path.name for path in (*places, *others) if path.exists()]
        problem = (
            f"{directory} has {', '.join(there)} already, which async_save=True would leave beside new schedulers "
        )
        problem += "and random states until all is written; give each save_state a directory of its own"
        fail_together(FileExistsError(problem) if there else None, None)
    session.save(places, whole=whole)
    if session.saves is None:
        on_first_rank(lambda: [discard(path) for path in others])  # What was saved in the other format.


def load_state(accelerator: Any, session: Session, stock: Callable[[], Any], directory: Any) -> None:
    """Call ``stock``, Accelerate's ``load_state``; we load models and optimizers. Collective over all ranks."""
    session.finish_saving()
    require_equal([("input_dir", str(directory))], None, "what load_state is to load")
    missing = directory is not None and not Path(directory).expanduser().is_dir()
    fail_together(FileNotFoundError(f"there is no directory {directory}") if missing else None, None)

    def load(found: str, with_model: bool) -> None:
        require_equal([("the model", str(with_model))], None, "what hooks of load_state leave to be loaded")
        read_states(session, Path(found), with_model=with_model)

    models = [] if session.engines[0].divides_weights else prepared_models(accelerator)
    _among_hooks(accelerator, "load", stock, load, lambda: models)
    # It is in a file of each rank, which new ranks do not have; all must be at the same micro-batch.
    step = [accelerator.step]
    dist.broadcast_object_list(step, src=0)
    accelerator.step = step[0]


def read_states(session: Session, directory: Path, *, with_model: bool) -> None:
    """Load what :func:`write_states` has written. Collective over all ranks."""
    states = _states(session.engines[0], with_model=with_model)
    found = [
        _find(directory, name, index, key, *(_STOCK if isinstance(part, Weights) else ()))
        for name, index, key, part in states
    ]
    together(lambda: require_one_save([checkpoint.path for checkpoint in found]))
    for checkpoint, (_, _, key, part) in zip(found, states, strict=True):
        content = checkpoint.content.get(key, {})
        # Safetensors has tied weights under one of their names.
        for uses in parameter_uses(part.module) if isinstance(part, Weights) else ():
            known = [content[use.name] for use in uses if use.name in content]
            content |= {use.name: value for value in known[:1] for use in uses}
        session.load(checkpoint, {key: part}, {}, strict=True)


def _among_hooks(
    accelerator: Any,
    when: Literal["save", "load"],
    stock: Callable[[], Any],
    action: Callable[[str, bool], None],
    offer: Callable[[], Sequence[Any]],
) -> Any:
    """Call Accelerate; arguments of :func:`in_place_of_states`. Collective over all ranks."""
    is_agreeing = False

    def act(directory: str, with_model: bool) -> None:
        nonlocal is_agreeing
        is_agreeing = True
        fail_together(None, None)  # Ranks that have failed before are in the other one.
        is_agreeing = False
        action(directory, with_model)

    error, result = None, None
    try:  # Hooks and objects of the user may fail on any rank, before `action` or after it; then all ranks raise.
        with in_place_of_states(accelerator, when, act, offer):
            result = stock()
    except Exception as problem:
        if is_agreeing:
            raise
        error = problem
    fail_together(error, None)
    return result


def _find(directory: Path, name: str, index: int, key: str, *others: str) -> Checkpoint:
    """Open what is there, under the names of FSDP2 or one of ``others``. Collective over all ranks."""
    paths = [*_paths(directory, name, index), *(directory / other for other in others)]

    def choose() -> Path:
        there = [path for path in paths if last_written(path).exists()]
        if not there:
            raise FileNotFoundError(
                f"{directory} has none of {', '.join(path.name for path in paths)}; load_state reads what save_state "
                "of an Accelerator with as many optimizers wrote, in a directory that every rank sees"
            )
        # Both formats are there if a process was killed before it has removed what the new one replaces.
        return there[0] if len(there) == 1 else max(there, key=time_of)

    def read(path: Path) -> Any:
        is_safe = path.suffix == ".safetensors"
        return load_file(path) if is_safe else torch.load(path, map_location="cpu", mmap=True, weights_only=True)

    # Rank 0 decides: a save may be about to end while the ranks look.
    found = gather(together(choose), None)[0]
    part = Checkpoint.open(found, metadata_name=None, weights_only=True, read=read)
    if not part.is_sharded:
        part.content = {key: part.content}
    part.weights_advice = ""  # load_state has no argument for it.
    return part


def _paths(directory: Path, name: str, index: int) -> tuple[Path, Path]:
    """The directory of shards, and the file."""
    return directory / f"{name}_{index}", directory / (f"{name}_{index}.bin" if index else f"{name}.bin")
