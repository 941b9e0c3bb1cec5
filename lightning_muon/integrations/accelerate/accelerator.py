"""``lightning_muon.accelerate.Accelerator``, and that of a Trainer of transformers.

The states that it saves and loads are the directories and files that Accelerate uses for FSDP2.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import accelerate
import torch
import torch.distributed as dist
from accelerate.logging import get_logger
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import StateDictType
from typing_extensions import override

from lightning_muon.checkpoint.loading import Checkpoint, time_of
from lightning_muon.checkpoint.manifest import require_one_save
from lightning_muon.checkpoint.saving import OptimizerState, Weights, collect
from lightning_muon.checkpoint.staging import discard, last_written, local_path
from lightning_muon.comm.agreement import (
    fail_together,
    gather,
    on_first_rank,
    require_equal,
    together,
)
from lightning_muon.compat.accelerate import in_place_of_states, is_prepared, mark_prepared
from lightning_muon.config import join_names
from lightning_muon.engine.conversion import tell
from lightning_muon.engine.options import Options
from lightning_muon.engine.session import Session
from lightning_muon.engine.training import TrainingEngine
from lightning_muon.integrations.accelerate.settings import (
    check_state,
    make_meshes,
    read_options,
    shard,
    sharding_of,
)
from lightning_muon.optim.gradients import skipped_steps

_log = get_logger(__name__)
OptionsLike = Options | Mapping[str, Any] | str | Path | None


class ShardedOptimizer(AcceleratedOptimizer):
    """Accelerate's wrapper, which steps where ``accumulate`` says so, around an optimizer of a sharded model."""

    # Whether a NaN or Inf in a gradient has made all ranks skip the last step; schedulers then wait.
    step_was_skipped = False  # type: ignore[assignment]

    def __init__(self, optimizer: torch.optim.Optimizer, engine: TrainingEngine) -> None:
        # Its state is on the device of its parameters already.
        super().__init__(optimizer, device_placement=False)
        self._engine = engine

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, unless the batch is to be accumulated. Collective over all ranks then."""
        # torch's tools for state dicts step optimizers that have no state yet, without any backward pass.
        has_gradients = closure is not None or self._engine.has_run
        if not (self.gradient_state.sync_gradients and has_gradients):
            return super().step(closure)

        before = skipped_steps(self.optimizer)
        stock = super().step
        result = self._engine.step(self.optimizer, lambda _, closure=None: stock(closure), closure)
        self.step_was_skipped = skipped_steps(self.optimizer) > before  # type: ignore[assignment]
        return result


class Accelerator(accelerate.Accelerator):
    """An ``accelerate.Accelerator`` that shards the model with this package, and trains it with ParallelMuon.

    Mesh and precision are those of the accelerate config (``fsdp_version: 2``, ``parallelism_config``,
    ``mixed_precision``), and everything that is not said here is as in Accelerate. Beside its arguments it takes
    ``options``: ``Options``, a mapping of the same keys, or the path of a YAML file; by default the file that the
    environment variable ``LIGHTNING_MUON_CONFIG`` names, if it does.

    Example::

        accelerator = lightning_muon.accelerate.Accelerator(options={"optimizer": {"momentum": 0.9}})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # becomes a ParallelMuon
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    """

    def __init__(self, *args: Any, options: OptionsLike = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Another rank may see another file.
        self.options = together(lambda: self._checked(read_options(options)))
        require_equal(self.options.lines, None, "the options of lightning_muon")
        if self.ddp_handler is not None and self.ddp_handler.to_kwargs() and self.is_main_process:
            warnings.warn(
                f"DistributedDataParallelKwargs has no effect ({join_names(self.ddp_handler.to_kwargs())}): "
                "lightning_muon averages gradients itself, and finds unused parameters",
                stacklevel=2,
            )
        self._session = Session(self.options, info=partial(tell, _log), warn=_log.warning)
        if dist.is_initialized():
            self._session.watch()

    def _checked(self, options: Options) -> Options:
        check_state(self.state, options)
        return options

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of the run, with the axes ``("replicate", "shard")``; there is none before ``prepare``."""
        if self._session.meshes is None:
            raise RuntimeError("there is no device mesh before accelerator.prepare(model, optimizer)")
        return self._session.meshes.user

    @override
    def prepare(self, *args: Any, device_placement: list[bool | None] | None = None) -> Any:
        """Shard a model and convert its optimizers; the rest is Accelerate's.

        A model and all its optimizers come in one call; schedulers come with them or later. A model alone is sharded
        for evaluation. Collective over all ranks.
        """
        models = [value for value in args if isinstance(value, nn.Module)]
        optimizers = [value for value in args if isinstance(value, torch.optim.Optimizer)]
        ready: dict[int, Any] = {}
        if (models or optimizers) and len(models) + len(self._session.engines) != 1:
            after = " after another one" if self._engine is not None else ""
            raise ValueError(
                f"prepare was given {len(models)} models{after}; an Accelerator shards one, with its optimizers or "
                "before them, until accelerator.free_memory(). Put networks that train together into one nn.Module, "
                "and prepare one that only evaluates with accelerator.prepare_model(model, evaluation_mode=True)"
            )
        if models:
            self._session.begin(lambda: make_meshes(self.state, self.options))
            shard(self, self._session, self.unwrap_model(models[0], keep_torch_compile=False))
        if optimizers:
            engine = self._session.engines[0]
            if engine.optimizers:
                raise ValueError(
                    f"prepare was given {type(optimizers[0]).__name__} after other optimizers; give all in one call"
                )
            plain = [getattr(each, "optimizer", each) if is_prepared(each) else each for each in optimizers]
            used = engine.attach(plain, source="what was given to prepare")
            for given, optimizer in zip(optimizers, used, strict=True):
                ready[id(given)] = sharded = ShardedOptimizer(optimizer, engine)
                mark_prepared(self, sharded)
        for model in models:
            # Autocast and compilation are those of Accelerate, which is not to shard anything.
            ready[id(model)] = super().prepare_model(model, evaluation_mode=True)

        placements = device_placement or [None] * len(args)
        others = [each for each in zip(args, placements, strict=True) if id(each[0]) not in ready]
        if others:
            values, placements = map(list, zip(*others, strict=True))
            prepared = super().prepare(*values, device_placement=placements)
            ready |= zip(map(id, values), prepared if len(values) > 1 else [prepared], strict=True)
        result = [ready[id(value)] for value in args]
        return tuple(result) if len(result) > 1 else result[0]

    @override
    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepare one model, as :meth:`prepare` does; with ``evaluation_mode`` it is not sharded."""
        if evaluation_mode or is_prepared(model):
            return super().prepare_model(model, device_placement, evaluation_mode)
        return self.prepare(model)

    @override
    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Prepare one optimizer, as :meth:`prepare` does, after the model."""
        return self.prepare(optimizer)

    @override
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Collective over all ranks, except inside of ``no_sync``."""
        with self._session.around_backward(loss_divided_by=self.gradient_accumulation_steps):
            super().backward(loss, **kwargs)

    def report_tokens(self, num_tokens: int | Tensor) -> None:
        """Say how many tokens the loss that goes to ``backward`` next sums over; local.

        With ``loss_scaling="tokens"`` every rank calls it once before each ``backward``, with losses that are sums:
        gradients are divided by the number of tokens of all ranks and all micro-batches of the step.
        """
        self._session.report_tokens(num_tokens)

    @override
    @contextmanager
    def no_sync(self, model: nn.Module) -> Generator[None]:
        engine = self._engine
        with super().no_sync(model) if engine is None else engine.no_sync():
            yield

    @override
    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip by the 2-norm over all shards, and return the norm before; 0 where ``accumulate`` reduces no gradients.

        Collective over all ranks.
        """
        engine = self._engine
        if engine is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)  # type: ignore[return-value, arg-type]
        if engine.is_accumulating or not self.sync_gradients:
            return torch.zeros((), device=self.device)
        return engine.clip_by_norm(_listed(parameters), max_norm, norm_type)

    @override
    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clip element by element, where :meth:`clip_grad_norm_` would clip. Collective as that is."""
        engine = self._engine
        if engine is None:
            super().clip_grad_value_(parameters, clip_value)
        elif not engine.is_accumulating and self.sync_gradients:
            engine.clip_by_value(_listed(parameters), clip_value)

    @override
    def save_state(self, output_dir: str | os.PathLike[str] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Collective over all ranks.

        Writes directories with the shards of each rank or a file for each object, as ``fsdp_state_dict_type`` says, or
        ``save_distributed_checkpoint`` where there is none. Hooks get no weights, as with Accelerate's FSDP.
        """
        local_path(output_dir or "")
        stock = partial(super().save_state, output_dir, *args, **kwargs)  # type: ignore[arg-type]
        return stock() if self._engine is None else save_state(self, self._session, stock)

    @override
    def load_state(self, input_dir: str | os.PathLike[str] | None = None, *args: Any, **kwargs: Any) -> None:
        """Also from other ranks, and another way of sharding. Collective over all ranks."""
        local_path(input_dir or "")
        stock = partial(super().load_state, input_dir, *args, **kwargs)
        if self._engine is None:
            stock()
        else:
            load_state(self, self._session, stock, input_dir)

    @override
    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return whole weights: of a sharded model on the CPU of rank 0, and an empty dict elsewhere.

        Collective over all ranks.
        """
        engine = self._engine
        if engine is None or self.unwrap_model(model, keep_torch_compile=False) is not engine.module:
            return super().get_state_dict(model, unwrap)
        if not engine.divides_weights:
            return super().get_state_dict(model, unwrap)
        return collect(engine.weights, engine.format(whole=True))

    @override
    def end_training(self) -> None:
        """What ``async_save`` writes is written first. Collective over all ranks."""
        self._session.finish_saving()
        super().end_training()

    @override
    def free_memory(self, *objects: Any) -> Any:
        """Hooks on the model are removed, it stays sharded."""
        self._session.close()
        return super().free_memory(*objects)

    @property
    def _engine(self) -> TrainingEngine | None:
        return next(iter(self._session.engines), None)


class TrainerAccelerator(Accelerator):
    """The Accelerator of a ``transformers.Trainer``, which saves and loads with functions of its own."""

    @override
    def _checked(self, options: Options) -> Options:
        kind, sharding = self.state.distributed_type, sharding_of(self.state, options)
        if options.async_save:
            raise ValueError(
                "async_save=True does not go with the Trainer of transformers, which writes by itself; remove it"
            )
        if kind != DistributedType.FSDP and (options.has_nodes or sharding not in ("ddp", "none")):
            what = "FlexDeMo" if options.has_nodes else f"sharding={sharding!r}"
            raise ValueError(
                f"with distributed_type: {kind.value} a Trainer saves what one process has, which is not all with "
                f"{what}; set distributed_type: FSDP and fsdp_version: 2, or sharding: ddp under lightning_muon"
            )
        return super()._checked(options)


def _listed(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


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
