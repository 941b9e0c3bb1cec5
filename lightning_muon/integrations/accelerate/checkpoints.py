"""The states that an Accelerator saves and loads: the directories and files that Accelerate uses for FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
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
)
from lightning_muon.compat.accelerate import in_place_of_states
from lightning_muon.engine.session import Session
from lightning_muon.engine.training import TrainingEngine


def save_state(accelerator: Any, session: Session, stock: Callable[[], Any]) -> Any:
    """Call ``stock``, Accelerate's ``save_state``; we write models and optimizers. Collective over all ranks."""
    session.finish_saving()  # Accelerate may remove older states.
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    whole = plugin is not None and plugin.state_dict_type == StateDictType.FULL_STATE_DICT
    if plugin is None or accelerator.options.save_distributed_checkpoint != "auto":
        whole = whole or session.saves_one_file
    return _with_states(accelerator, "save", stock, partial(_write_states, session, whole=whole))


def load_state(accelerator: Any, session: Session, stock: Callable[[], Any], directory: Any) -> None:
    """Call ``stock``, Accelerate's ``load_state``; we load models and optimizers. Collective over all ranks."""
    session.finish_saving()
    require_equal([("input_dir", str(directory))], None, "what load_state is to load")
    missing = directory is not None and not Path(directory).expanduser().is_dir()
    fail_together(FileNotFoundError(f"there is no directory {directory}") if missing else None, None)
    _with_states(accelerator, "load", stock, partial(_read_states, session))
    # It is in a file of each rank, which new ranks do not have; all must be at the same micro-batch.
    step = [accelerator.step]
    dist.broadcast_object_list(step, src=0)
    accelerator.step = step[0]


def _with_states(
    accelerator: Any, when: Literal["save", "load"], stock: Callable[[], Any], action: Callable[[str], None]
) -> Any:
    """Call Accelerate, with ``action`` in place of what it does itself. Collective over all ranks."""
    is_agreeing = False

    def act(directory: str) -> None:
        nonlocal is_agreeing
        is_agreeing = True
        fail_together(None, None)  # Ranks that have failed before are in the other one.
        is_agreeing = False
        action(directory)

    error, result = None, None
    try:  # Hooks and objects of the user may fail on any rank, before `action` or after it; then all ranks raise.
        with in_place_of_states(accelerator, when, act):
            result = stock()
    except Exception as problem:
        if is_agreeing:
            raise
        error = problem
    fail_together(error, None)
    return result


def _states(engine: TrainingEngine) -> list[tuple[str, int, str, Weights | OptimizerState]]:
    """Each state: Accelerate's name and number of it with FSDP2, its key in a directory, and what it is of; local."""
    states = [OptimizerState(engine.module, optimizer, is_by_name=True) for optimizer in engine.optimizers]
    optimizers = [("optimizer", index, "optimizer", state) for index, state in enumerate(states)]
    return [("pytorch_model_fsdp", 0, "model", engine.weights), *optimizers]


def _write_states(session: Session, directory: str, *, whole: bool) -> None:
    """Write them in the places of what is there. Collective over all ranks."""
    places, others = dict[Path, dict[str, Any]](), list[Path]()
    for name, index, key, part in _states(session.engines[0]):
        both = _paths(Path(directory), name, index)
        places[both[whole]] = {"" if whole else key: part}
        others.append(both[not whole])
    if session.saves is not None:
        there = [path.name for path in (*places, *others) if path.exists()]
        problem = (
            f"{directory} has {', '.join(there)} already, which async_save=True would leave beside new schedulers "
            "and random states until all is written; give each save_state a directory of its own"
        )
        fail_together(FileExistsError(problem) if there else None, None)
    session.save(places, whole=whole)
    if session.saves is None:
        on_first_rank(lambda: [discard(path) for path in others])  # What was saved in the other format.


def _read_states(session: Session, directory: str) -> None:
    """Load what :func:`_write_states` has written. Collective over all ranks."""
    states = _states(session.engines[0])
    found = [_find(Path(directory), name, index, key) for name, index, key, _ in states]
    together(lambda: require_one_save([checkpoint.path for checkpoint in found]))
    for checkpoint, (_, _, key, part) in zip(found, states, strict=True):
        session.load(checkpoint, {key: part}, {}, strict=True)


def _find(directory: Path, name: str, index: int, key: str) -> Checkpoint:
    """Open what is there, in one format or the other. Collective over all ranks."""
    paths = _paths(directory, name, index)

    def choose() -> Path:
        there = [path for path in paths if last_written(path).exists()]
        if not there:
            raise FileNotFoundError(
                f"{directory} has none of {', '.join(path.name for path in paths)}; load_state reads what save_state "
                "of an Accelerator wrote, of ours or with FSDP2, with as many optimizers, where every rank sees it"
            )
        # Both formats are there if a process was killed before it has removed what the new one replaces.
        return there[0] if len(there) == 1 else max(there, key=time_of)

    # Rank 0 decides: a save may be about to end while the ranks look.
    found = gather(together(choose), None)[0]
    part = Checkpoint.open(found, metadata_name=None, weights_only=True)
    if not part.is_sharded:
        part.content = {key: part.content}
    return part


def _paths(directory: Path, name: str, index: int) -> tuple[Path, Path]:
    """The directory of shards, and the file."""
    return directory / f"{name}_{index}", directory / (f"{name}_{index}.bin" if index else f"{name}.bin")
