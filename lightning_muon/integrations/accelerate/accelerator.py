"""An Accelerator that divides models, adopts optimizers and saves states as the strategies of this package do."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.comm.agreement import fail_together, require_equal
from lightning_muon.compat.accelerate import add_optimizer, is_prepared
from lightning_muon.engine.mesh_sizes import Meshes
from lightning_muon.engine.options import Options
from lightning_muon.engine.training import TrainingEngine, close_all, close_with
from lightning_muon.integrations.accelerate.optimizer import ShardedOptimizer
from lightning_muon.integrations.accelerate.preparation import describe, make_meshes, shard
from lightning_muon.integrations.accelerate.settings import check_state, read_options
from lightning_muon.integrations.accelerate.states import SavesStates

_log = get_logger(__name__)
OptionsLike = Options | Mapping[str, Any] | str | Path | None


class MuonAccelerator(SavesStates):
    """The part that this package adds to an ``accelerate.Accelerator``, the class beside it.

    Everything that is not said here is as in Accelerate: launcher, process group, data loaders, metrics, trackers.

    Args:
        *args: Of ``accelerate.Accelerator``.
        options: ``Options``, a mapping of the same keys, or the path of a YAML file. ``None``: the file that the
            environment variable ``LIGHTNING_MUON_CONFIG`` names, else the defaults.
        **kwargs: Of ``accelerate.Accelerator``.

    Attributes:
        options: What was given, read.
    """

    options: Options
    # Of the class beside it.
    state: Any
    device: torch.device
    sync_gradients: bool
    gradient_accumulation_steps: int
    even_batches: bool
    _meshes: Meshes | None = None

    def __init__(self, *args: Any, options: OptionsLike = None, **kwargs: Any) -> None:
        error: Exception | None = None
        read = Options()
        try:
            read = read_options(options)
        except Exception as problem:  # Another rank may see another file; it is told once there are means to tell it.
            error = problem
        stock = super().__init__
        bound = inspect.signature(stock).bind(*args, **kwargs).arguments
        bound["kwargs_handlers"] = _with_process_group(bound.get("kwargs_handlers"), read)
        stock(**bound)
        self.use_options(read, error)

    def use_options(self, options: Options, error: Exception | None = None) -> None:
        """Begin, on an Accelerator that exists. Collective over all ranks; every rank must call it.

        Args:
            options: How to divide models.
            error: What went wrong on this rank before the ranks could be told.

        Raises:
            ValueError: On all ranks, for what Accelerate was told and the engine cannot honour.
            RuntimeError: If the ranks have different options.
        """
        try:
            check_state(self.state, options)
        except ValueError as problem:
            error = error or problem
        fail_together(error, None)
        require_equal(describe(options), None, "the options of lightning_muon")
        self.options = options
        self._engines: list[TrainingEngine] = []
        # An Accelerator has no end; the other ranks should know when this one has come to it.
        close_with(self, self._engines)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of the run, with the axes ``("replicate", "shard")``; there is none before ``prepare``."""
        if self._meshes is None:
            raise RuntimeError("there is no device mesh before accelerator.prepare(model, optimizer)")
        return self._meshes.user

    def prepare(self, *args: Any, device_placement: list[bool | None] | None = None) -> Any:
        """As in Accelerate; a model is divided and its optimizers adopted.

        A model and all its optimizers come in one call; schedulers come with them or later. A model alone is divided
        for evaluation. Collective over all ranks; every rank must call it.
        """
        models = [value for value in args if isinstance(value, nn.Module)]
        optimizers = [value for value in args if isinstance(value, torch.optim.Optimizer)]
        schedulers = [value for value in args if isinstance(value, torch.optim.lr_scheduler.LRScheduler)]
        ready: dict[int, Any] = {}
        if models or optimizers:
            engine = self._sharded(models)
            if optimizers:
                ready |= zip(map(id, optimizers), self._attached(engine, optimizers, schedulers), strict=True)
            for model in models:
                # Autocast and compilation are those of Accelerate, which is not to divide anything.
                ready[id(model)] = super().prepare_model(model, evaluation_mode=True)  # type: ignore[misc]
        placements = device_placement or [None] * len(args)
        others = [each for each in zip(args, placements, strict=True) if id(each[0]) not in ready]
        if others:
            values, placements = map(list, zip(*others, strict=True))
            prepared = super().prepare(*values, device_placement=placements)  # type: ignore[misc]
            ready |= zip(map(id, values), prepared if len(values) > 1 else [prepared], strict=True)
        result = tuple(ready[id(value)] for value in args)
        return result if len(result) > 1 else result[0]

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """As in Accelerate with ``evaluation_mode``, which divides nothing; else as :meth:`prepare`."""
        if evaluation_mode or is_prepared(model):
            return super().prepare_model(model, device_placement, evaluation_mode)  # type: ignore[misc]
        return self.prepare(model)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """As :meth:`prepare`, after the model."""
        del device_placement  # Its state is where its parameters are.
        return self.prepare(optimizer)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """As in Accelerate. Collective over all ranks, except inside of ``no_sync``; every rank must call it."""
        engine = self._engine
        if engine is None:
            super().backward(loss, **kwargs)  # type: ignore[misc]
            return
        with engine.around_backward(loss_divided_by=self.gradient_accumulation_steps):
            super().backward(loss, **kwargs)  # type: ignore[misc]

    def report_tokens(self, num_tokens: int | Tensor) -> None:
        """Say how many tokens the loss that goes to ``backward`` next sums over; local.

        With ``loss_scaling="tokens"`` every rank calls it once before each ``backward``, with losses that are sums:
        gradients are divided by the number of tokens of all ranks and all micro-batches of the step.
        """
        tokens = None if self._engine is None else self._engine.tokens
        if tokens is None:
            raise RuntimeError(
                "report_tokens needs the option loss_scaling='tokens', and comes after prepare(model, optimizer)"
            )
        tokens.begin_micro_batch()
        tokens.report(num_tokens)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Generator[None]:
        """Forward and backward inside do not communicate gradients; local."""
        engine = self._engine
        with super().no_sync(model) if engine is None else engine.no_sync():  # type: ignore[misc]
            yield

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Generator[None]:
        """As in Accelerate with its FSDP, where it has no effect; ranks with fewer batches would hold up the others.

        Raises:
            ValueError: If a model is divided and batches need not be even.
        """
        if self._engine is None:
            with super().join_uneven_inputs(joinables, even_batches):  # type: ignore[misc]
                yield
            return
        if not (self.even_batches if even_batches is None else even_batches):
            raise ValueError(
                "join_uneven_inputs with even_batches=False: a divided model needs as many batches on each rank; leave "
                "even_batches=True, which repeats samples at the end (gather_for_metrics drops them again)"
            )
        yield

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip by the 2-norm over all shards, and return the norm before.

        Where ``accumulate`` has left gradients unreduced nothing happens, and the norm is 0. Collective over all ranks;
        every rank must call it.
        """
        engine = self._engine
        if engine is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)  # type: ignore[misc]
        if float(norm_type) != 2.0:
            raise ValueError(f"clip_grad_norm_(norm_type={norm_type}): only the 2-norm is computed over all shards")
        if engine.is_accumulating or not self.sync_gradients:
            return torch.zeros((), device=self.device)
        return engine.clip_parameters_by_norm(_listed(parameters), max_norm)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clip element by element, where :meth:`clip_grad_norm_` would clip. Collective as that is."""
        engine = self._engine
        if engine is None:
            super().clip_grad_value_(parameters, clip_value)  # type: ignore[misc]
        elif not engine.is_accumulating and self.sync_gradients:
            engine.clip_parameters_by_value(_listed(parameters), clip_value)

    def free_memory(self, *objects: Any) -> Any:
        """As in Accelerate; hooks on the model are removed, it stays divided."""
        close_all(self._engines)
        return super().free_memory(*objects)  # type: ignore[misc]

    @property
    def _engine(self) -> TrainingEngine | None:
        return self._engines[0] if self._engines else None

    def _sharded(self, models: Sequence[nn.Module]) -> TrainingEngine:
        """The engine of a model that is sharded now, or was before. Collective over all ranks."""
        if len(models) + len(self._engines) != 1:
            raise ValueError(
                f"prepare was given {len(models)} models{' after another one' if self._engines else ''}; an "
                "Accelerator divides one model, which comes in one call with all its optimizers, or before them "
                "(accelerator.free_memory() lets another one follow)"
            )
        if models:
            if self._meshes is None:
                self._meshes = make_meshes(self.state, self.options)
            module = self.unwrap_model(models[0], keep_torch_compile=False)  # type: ignore[attr-defined]
            self._engines.append(shard(self, module, self._meshes))
        return self._engines[0]

    def _attached(
        self, engine: TrainingEngine, optimizers: Sequence[Any], schedulers: Sequence[Any]
    ) -> list[ShardedOptimizer]:
        """What takes the place of the optimizers. Collective over all ranks; every rank must call it."""
        if engine.optimizers:
            raise ValueError(
                f"prepare was given {type(optimizers[0]).__name__} after other optimizers of the same model; give all "
                "of them in one call"
            )
        given = [optimizer.optimizer if is_prepared(optimizer) else optimizer for optimizer in optimizers]
        used = engine.attach(given, schedulers, source="what was given to prepare")
        if note := engine.gradient_note:
            _log.info(note)
        result = [ShardedOptimizer(optimizer, engine) for optimizer in used]
        for optimizer in result:
            add_optimizer(self, optimizer)
        return result


def _with_process_group(handlers: Sequence[Any] | None, options: Options) -> list[Any]:
    """The handlers of the user, with what our options say of the process group.

    Raises:
        ValueError: If both say something.
    """
    given = list(handlers or [])
    ours: dict[str, Any] = {}
    if options.process_group_backend is not None:
        ours["backend"] = options.process_group_backend
    if options.timeout != Options.timeout:
        ours["timeout"] = options.timeout
    if ours and any(isinstance(handler, InitProcessGroupKwargs) for handler in given):
        raise ValueError(
            f"{' and '.join(ours)} of lightning_muon, and an InitProcessGroupKwargs; give only one of them"
        )
    return [*given, InitProcessGroupKwargs(**ours)] if ours else given


def _listed(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
