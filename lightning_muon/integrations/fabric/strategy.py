"""The strategies ``"parallel_muon"`` and ``"flexdemo"`` of Fabric, for either of its packages; see the registry."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.checkpoint.loading import Checkpoint
from lightning_muon.checkpoint.saving import Filters, State, save
from lightning_muon.checkpoint.staging import local_path
from lightning_muon.compat.lightning import metadata_filename, set_no_backward_sync
from lightning_muon.compat.torch import free_unsharded
from lightning_muon.config import takes_options
from lightning_muon.engine.forward_methods import register_steps
from lightning_muon.engine.model_setup import SUPPORTED, of_float16
from lightning_muon.engine.options import IN_PYTHON, Options
from lightning_muon.engine.training import TrainingEngine, close_all
from lightning_muon.integrations.strategy import MuonStrategy
from lightning_muon.params.layout import parameters_of
from lightning_muon.sharding.tokens import TokenCount


@takes_options(Options, IN_PYTHON)
class FabricStrategy(MuonStrategy):
    """Trains the modules of a Fabric program with FSDP2 hybrid sharding and ParallelMuon.

    The base class beside it is the ``ModelParallelStrategy`` of one package of Fabric: launcher, process group and
    collectives are Fabric's. Each module that is set up has a
    :class:`~lightning_muon.engine.training.TrainingEngine` of its own.

    Example::

        fabric = Fabric(accelerator="cpu", devices=4, strategy=ParallelMuonFabricStrategy(replicate_size=2))
        fabric.launch()
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    """

    user = "Fabric"
    # Of the class beside it.
    cluster_environment: Any
    broadcast: Callable[..., Any]

    def _begin(self, **arguments: Any) -> None:
        self._engines: list[TrainingEngine] = []
        self._tokens: TokenCount | None = None
        super()._begin(parallelize_fn=lambda module, _: module, **arguments)
        set_no_backward_sync(self, self._no_backward_sync)
        # Fabric has no end; the other ranks should know when this one has come to it.
        weakref.finalize(self, close_all, self._engines, is_end=True)

    @property
    def precision(self) -> Any:
        """Fabric's precision plugin."""
        return super().precision  # type: ignore[misc]

    @precision.setter
    def precision(self, plugin: Any) -> None:
        name = str(getattr(plugin, "precision", SUPPORTED[0]))
        if name not in SUPPORTED:
            raise ValueError(f"Fabric(precision={name!r}) is not supported{of_float16(name)}; use one of {SUPPORTED}")
        super(FabricStrategy, type(self)).precision.fset(self, plugin)  # type: ignore[attr-defined]

    @property
    def device_mesh(self) -> DeviceMesh:
        """Axes ``("replicate", "shard")``, then ``"context"`` and ``"tensor"`` where they are larger than 1."""
        if self._meshes is None:
            raise RuntimeError("there is no device mesh before fabric.launch()")
        return self._meshes.user

    def setup_environment(self) -> None:
        """Start the process group and make the mesh. Collective over all ranks."""
        self.accelerator.setup_device(self.root_device)
        self._start_processes()

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard the module. Collective over all ranks."""
        if (before := _engine_with(self._engines, module)) is not None:  # It is set up again.
            before.close()
            self._engines.remove(before)
        for engine in self._engines:
            if engine.optimizers and not set(module.parameters()).isdisjoint(engine.module.parameters()):
                raise ValueError(
                    f"{type(module).__name__} shares parameters with {type(engine.module).__name__}, which has been "
                    "set up with optimizers of its own; set up one module that holds all parameters they share"
                )
        # The loop is the user's, and may read weights right after a step.
        engine = self._make_engine(module, self.precision.precision, wait_for_parameters=True, is_only_module=False)
        engine.shard(self.root_device)
        if engine.pipeline is not None:
            engine.pipeline.forward_context = self.precision.forward_context
        # ``generate`` of models inside of the module; a method of the module itself goes through Entry.
        for child in module.children():
            register_steps(child)
        self._engines.append(engine)
        return Entry(module, self._engines)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return what becomes of it. Collective over all ranks."""
        for engine in self._engines:
            engine.rebind([optimizer])
        parameters = parameters_of(optimizer)
        owners = [each for each in self._engines if not set(each.module.parameters()).isdisjoint(parameters)]
        if len(owners) != 1:
            names = " and ".join(type(engine.module).__name__ for engine in owners) or "no module"
            raise ValueError(
                f"{type(optimizer).__name__} has parameters of {names} that was set up before it; set it up first"
            )
        return self._attach(owners[0], [optimizer])[0]

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[torch.optim.Optimizer], Any]:
        """Shard the module, and return what becomes of its optimizers. Collective over all ranks."""
        entry = self.setup_module(module)
        used = self._attach(self._engines[-1], optimizers, [] if scheduler is None else [scheduler])
        return entry, used, scheduler

    def report_tokens(self, num_tokens: int | Tensor) -> None:
        """Say how many tokens the loss that goes to ``fabric.backward`` next sums over; local.

        With ``loss_scaling="tokens"`` every rank calls it before each backward pass, with losses that are sums:
        gradients are divided by the number of tokens of all ranks and all micro-batches of the step.
        """
        if self._tokens is None:
            raise RuntimeError(
                "report_tokens takes the option loss_scaling='tokens', and comes after fabric.setup(module, optimizer)"
            )
        self._tokens.report_before_backward(num_tokens)

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Backward. Collective over all ranks, except inside of ``no_backward_sync``."""
        if self._tokens is not None:
            self._tokens.begin_backward()
            last = [engine for engine in self._engines if engine.is_last_micro_batch]
            if last and any(engine.is_accumulating for engine in self._engines):
                raise RuntimeError(
                    f"no_backward_sync of some models, but not of {type(last[0].module).__name__}: tokens "
                    "(loss_scaling='tokens') are counted for all models together; enter that of each of them"
                )
        with ExitStack() as stack:
            for engine in self._engines:
                stack.enter_context(engine.around_backward())
            super().backward(tensor, module, *args, **kwargs)  # type: ignore[misc]

    def optimizer_step(self, optimizer: torch.optim.Optimizer, **kwargs: Any) -> Any:
        """Step. Collective over all ranks."""
        engine, current = self._engine_of(optimizer)
        return engine.step(current, self.precision.optimizer_step, **kwargs)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip by one norm, and return the norm before. Collective over all ranks."""
        engine, current = self._engine_of(optimizer)
        norm = engine.clip_by_norm(parameters_of(current), max_norm, norm_type)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"the norm of the gradients is {norm.item()}; clip_gradients(error_if_nonfinite=False) skips the step"
            )
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Clip element by element. Collective over all ranks."""
        engine, current = self._engine_of(optimizer)
        engine.clip_by_value(parameters_of(current), clip_val)

    def save_checkpoint(
        self,
        path: str | Path,
        state: Mapping[str, Any],
        storage_options: Any = None,
        filter: Filters | None = None,  # noqa: A002 - Fabric's name
    ) -> None:
        """Save as ``ModelParallelStrategy`` does. Collective over all ranks."""
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} has no CheckpointIO that could take storage_options")
        are_small = [engine.saves_one_file for engine in self._engines]
        is_file = self.options.save_distributed_checkpoint is not True and all(are_small)
        metadata_name = None if is_file else metadata_filename(self.package)
        target = local_path(self.broadcast(path))
        assert self._meshes is not None, "fabric.launch() comes first"
        kinds, filters = self._by_kind(state), filter or {}
        save(target, kinds, self._meshes.data, filters=filters, metadata_name=metadata_name, saves=self._saves)

    def load_checkpoint(
        self,
        path: str | Path,
        state: nn.Module | torch.optim.Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load into ``state``, and return what it did not ask for. Collective over all ranks."""
        if state is None or (isinstance(state, dict) and not state):
            raise ValueError(f"fabric.load({str(path)!r}) needs a state to load into, such as {{'model': model}}")
        self.finish_saving()
        checkpoint = Checkpoint.open(
            local_path(path),
            metadata_name=metadata_filename(self.package),
            weights_only=weights_only,
        )
        if isinstance(state, dict):
            remainder = checkpoint.load(self._by_kind(state), state, strict=strict)
        elif checkpoint.is_sharded:
            raise ValueError(
                f"{checkpoint.path} is a directory of shards: fabric.load(path, state), with the keys of fabric.save"
            )
        else:  # A file that is the state dict of one object.
            checkpoint.content = {"": checkpoint.content}
            remainder = checkpoint.load(self._by_kind({"": state}), {}, strict=strict)
        for engine in self._engines:
            engine.weights_have_changed()
        return remainder

    def teardown(self) -> None:
        """Remove all hooks; modules stay sharded."""
        self.finish_saving()
        close_all(self._engines)
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None
        self.precision.teardown()
        self.accelerator.teardown()
        self.cluster_environment.teardown()

    def _attach(
        self, engine: TrainingEngine, given: Sequence[torch.optim.Optimizer], schedulers: Sequence[Any] = ()
    ) -> list[torch.optim.Optimizer]:
        engine.tokens = self._tokens  # One count for all modules.
        every = [*engine.optimizers, *given]
        used = engine.attach(every, schedulers, source="the optimizers that were set up")
        self._tokens = engine.tokens
        if self.options.optimizer == "auto" and sum(bool(each.proxies) for each in self._engines) > 1:
            self.package.fabric("utilities.rank_zero").rank_zero_warn(
                "Optimizers of several modules were converted to ParallelMuon. If the modules train against each other "
                "(a GAN), AdamW is better: set optimizer='keep' in the strategy."
            )
        return used[len(every) - len(given) :]

    def _engine_of(self, optimizer: torch.optim.Optimizer) -> tuple[TrainingEngine, torch.optim.Optimizer]:
        for engine in self._engines:
            current = engine.current(optimizer)
            if current is not None:
                return engine, current
        raise ValueError(
            f"this {type(optimizer).__name__} was not set up; use what fabric.setup or setup_optimizers has returned"
        )

    def _by_kind(self, state: Mapping[str, Any]) -> State:
        result = State()
        for key, value in state.items():
            if isinstance(value, nn.Module):
                engine = _engine_with(self._engines, value)
                own = value.module if isinstance(value, Entry) else value
                result.modules[key] = (own, []) if engine is None else (engine.module, engine.optimizers)
                result.about |= {} if engine is None else engine.description()
            elif isinstance(value, torch.optim.Optimizer):
                engine, current = self._engine_of(value)
                result.optimizers[key] = (engine.module, current)
                result.checks[key] = engine.finite_check(current)
            else:
                result.rest[key] = value
        return result

    def _no_backward_sync(self, module: nn.Module) -> AbstractContextManager[None]:
        engine = _engine_with(self._engines, module)
        if engine is None:
            raise ValueError(
                f"no_backward_sync of a {type(module).__name__} that this Fabric does not train (any more)"
            )
        return engine.no_sync()


def _engine_with(engines: Sequence[TrainingEngine], module: nn.Module) -> TrainingEngine | None:
    own = module.module if isinstance(module, Entry) else module
    return next((engine for engine in engines if engine.module is own), None)


class Entry(nn.Module):
    """Calls ``module``: Fabric sends ``fabric_model.method(...)`` through the forward of what is around it.

    Calling a method on the module itself would find shards where FSDP2 has not gathered the weights.
    """

    def __init__(self, module: nn.Module, engines: Sequence[TrainingEngine]) -> None:
        super().__init__()
        self.module = module
        self._engines = engines

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. After a call that no backward pass can follow, as in an evaluation, weights are shards."""
        engine = _engine_with(self._engines, self.module)  # The module may have been set up again.
        has_grad = torch.is_grad_enabled()
        with (
            nullcontext() if engine is None else engine.around_forward(),
            # Tensors into which FSDP2 gathers weights in inference mode could not be used later.
            torch.inference_mode(False),
            torch.set_grad_enabled(has_grad),
        ):
            output = self.module(*args, **kwargs)
        if not has_grad:
            free_unsharded(self.module)
        return output
