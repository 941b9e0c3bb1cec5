"""The states that an Accelerator saves and loads: the directories and files that Accelerate uses for FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import StateDictType

from lightning_muon.checkpoint.loading import Checkpoint
from lightning_muon.checkpoint.manifest import require_one_save, write_file
from lightning_muon.checkpoint.newest import first_intact
from lightning_muon.checkpoint.saving import describe_save, skipped_steps, write_shards
from lightning_muon.checkpoint.staging import last_written, replacing
from lightning_muon.comm.agreement import fail_together, on_first_rank, require_equal, together, warn_on_first_rank
from lightning_muon.compat.accelerate import in_place_of_states, prepared_models
from lightning_muon.compat.torch import free_unsharded
from lightning_muon.engine.training import TrainingEngine
from lightning_muon.optim.gradients import FiniteCheck
from lightning_muon.params.uses import parameter_uses

# The names that Accelerate gives to models and optimizers of FSDP2, and the keys inside of their directories.
_MODEL, _MODEL_KEY = "pytorch_model_fsdp", "model"
_OPTIMIZER, _OPTIMIZER_KEY = "optimizer", "optimizer"
_STOCK = "model.safetensors", "pytorch_model.bin"  # What Accelerate calls a model that it has not sharded.


def save_state(accelerator: Any, engine: TrainingEngine, stock: Callable[[], Any]) -> Any:
    """Call ``stock``, Accelerate's ``save_state``; we write models and optimizers. Collective over all ranks."""
    if not accelerator.sync_gradients:
        text = "save_state inside of an accumulated batch: the gradients of its micro-batches are in no checkpoint; "
        warn_on_first_rank(f"{text}call it where accelerator.sync_gradients is true", stacklevel=3)
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    whole = plugin is not None and plugin.state_dict_type == StateDictType.FULL_STATE_DICT
    if plugin is None or accelerator.options.save_distributed_checkpoint != "auto":
        whole = whole or engine.saves_one_file

    def save(directory: str, with_model: bool) -> None:
        chosen = [with_model]
        dist.broadcast_object_list(chosen, src=0)  # Hooks write, and take what they have written, on rank 0 only.
        write_states(engine, Path(directory), whole=whole, with_model=chosen[0])

    def weights() -> Sequence[Any]:
        return () if engine.divides_weights else [accelerator.get_state_dict(engine.module)]

    return _among_hooks(accelerator, "save", stock, save, weights)


def write_states(engine: TrainingEngine, directory: Path, *, whole: bool, with_model: bool) -> None:
    """Write them in the places of what is there. Collective over all ranks."""
    about = describe_save(**engine.description(), **skipped_steps(_checks(engine)))

    def write(path: Path, key: str, state: Any) -> None:
        if whole:
            on_first_rank(lambda: write_file(state, path, about))
        else:
            write_shards({key: state}, path, about)

    prepare_for_reading(engine)
    places = [_paths(directory, _OPTIMIZER, index) for index in range(len(engine.optimizers))]
    places += [_paths(directory, _MODEL, 0)] if with_model else []
    # What was saved in the other format goes in the same moment.
    obsolete = [place[not whole] for place in places]
    options = StateDictOptions(full_state_dict=whole, cpu_offload=True)
    with replacing(*(place[whole] for place in places), whole=whole, obsolete=obsolete) as drafts:
        if with_model:
            write(drafts[-1], _MODEL_KEY, engine.weights_to_save(whole=whole))
        for draft, optimizer in zip(drafts, engine.optimizers, strict=False):
            write(draft, _OPTIMIZER_KEY, get_optimizer_state_dict(engine.module, optimizer, options=options))


def load_state(accelerator: Any, engine: TrainingEngine, stock: Callable[[], Any], directory: Any) -> None:
    """Call ``stock``, Accelerate's ``load_state``; we load models and optimizers. Collective over all ranks."""
    require_equal([("input_dir", str(directory))], None, "what load_state is to load")
    missing = directory is not None and not Path(directory).expanduser().is_dir()
    fail_together(FileNotFoundError(f"there is no directory {directory}") if missing else None, None)

    def load(found: str, with_model: bool) -> None:
        require_equal([("the model", str(with_model))], None, "what hooks of load_state leave to be loaded")
        read_states(engine, Path(found), with_model=with_model)

    models = [] if engine.divides_weights else prepared_models(accelerator)
    _among_hooks(accelerator, "load", stock, load, lambda: models)
    # It is in a file of each rank, which new ranks do not have; all must be at the same micro-batch.
    step = [accelerator.step]
    dist.broadcast_object_list(step, src=0)
    accelerator.step = step[0]


def read_states(engine: TrainingEngine, directory: Path, *, with_model: bool) -> None:
    """Load what :func:`write_states` has written. Collective over all ranks."""
    prepare_for_reading(engine)
    parts = [_find(directory, _OPTIMIZER, index, _OPTIMIZER_KEY) for index in range(len(engine.optimizers))]
    parts += [_find(directory, _MODEL, 0, _MODEL_KEY, *_STOCK)] if with_model else []
    together(lambda: require_one_save([part.path for part in parts]))
    if with_model:
        weights = parts.pop()
        content = weights.content.get(_MODEL_KEY, {})
        for uses in parameter_uses(engine.module):  # Safetensors has tied weights under one of their names.
            known = [content[use.name] for use in uses if use.name in content]
            content |= {use.name: value for value in known[:1] for use in uses}
        weights.load_weights(_MODEL_KEY, engine.module, strict=True)
    for part, optimizer in zip(parts, engine.optimizers, strict=True):
        part.load_optimizer(_OPTIMIZER_KEY, engine.module, optimizer)
        part.load_skipped_steps(_checks(engine))
    engine.weights_have_changed()


def _checks(engine: TrainingEngine) -> dict[str, FiniteCheck]:
    """The counters of skipped steps, one for each optimizer; local."""
    return {f"{_OPTIMIZER}_{index}": engine.finite_check(each) for index, each in enumerate(engine.optimizers)}


def prepare_for_reading(engine: TrainingEngine) -> None:
    """Let weights have their new values, and be shards; local."""
    engine.mode.finish_parameters()
    free_unsharded(engine.module)  # An evaluation leaves the root whole.


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
    # Rank 0 decides: a save may be about to end while the ranks look.
    found = [next((path for path in paths if last_written(path).exists()), None)]
    dist.broadcast_object_list(found, src=0)

    def look() -> Path:
        if found[0] is None or not last_written(found[0]).exists():
            raise FileNotFoundError(
                f"{directory} has none of {', '.join(path.name for path in paths)}; load_state reads what save_state "
                "of an Accelerator with as many optimizers wrote, in a directory that every rank sees"
            )
        return found[0]

    path = first_intact([together(look)])

    def read() -> Checkpoint:
        if path.is_dir():
            return Checkpoint(path, {}, is_sharded=True)
        is_safe = path.suffix == ".safetensors"
        content = load_file(path) if is_safe else torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return Checkpoint(path, {key: content}, is_sharded=False)

    part = together(read)
    part.weights_advice = ""  # load_state has no argument for it.
    return part


def _paths(directory: Path, name: str, index: int) -> tuple[Path, Path]:
    """The directory of shards, and the file."""
    return directory / f"{name}_{index}", directory / (f"{name}_{index}.bin" if index else f"{name}.bin")
