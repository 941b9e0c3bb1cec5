"""The strategy ``"parallel_muon"`` of Fabric, without the package that it belongs to; see :mod:`.registry`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_muon.checkpoint.loading import StateCheckpoint, load_alone
from lightning_muon.checkpoint.saving import Filters, State, save
from lightning_muon.checkpoint.staging import last_written
from lightning_muon.comm.agreement import require_equal
from lightning_muon.compat.fabric import set_no_backward_sync
from lightning_muon.compat.lightning import metadata_filename
from lightning_muon.config import from_arguments, takes_options
from lightning_muon.engine.conversion import (
    OptimizerChoice,
    OptimizerProxy,
    ReplacedParameters,
    convert_optimizers,
    describe_optimizers,
    optimizer_warnings,
)
from lightning_muon.engine.mesh_sizes import Size
from lightning_muon.engine.model_setup import mixed_precision_policy
from lightning_muon.engine.options import ELSEWHERE, ClipGroups, LossScaling, Options
from lightning_muon.engine.training import Training
from lightning_muon.integrations.fabric.entry import Entry, unwrapped
from lightning_muon.integrations.fabric.environment import FabricEnvironment
from lightning_muon.integrations.fabric.prepare import prepare
from lightning_muon.integrations.fabric.tokens import ReportedTokens
from lightning_muon.sharding.mode import BucketBytes
from lightning_muon.sharding.modes import Sharding, make_mode
from lightning_muon.sharding.units import WrapPolicy, check_tensor_parallel


@takes_options(Options, ELSEWHERE)
class ParallelMuonFabric(FabricEnvironment):
    """Trains the modules of a Fabric program with FSDP2 hybrid sharding and ParallelMuon.

    The base class beside it is the ``ModelParallelStrategy`` of one package of Fabric: launcher, process group and
    collectives are Fabric's.

    Example::

        fabric = Fabric(accelerator="cpu", devices=4, strategy=ParallelMuonFabricStrategy(replicate_size=2))
        fabric.launch()
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    """

    # Of the class beside it.
    cluster_environment: Any
    broadcast: Callable[..., Any]

    def __init__(
        self,
        replicate_size: Size = Options.replicate_size,
        shard_size: Size = Options.shard_size,
        optimizer: OptimizerChoice = Options.optimizer,
        wrap_policy: WrapPolicy = Options.wrap_policy,
        reshard_after_forward: bool = Options.reshard_after_forward,
        *,
        sharding: Sharding = Options.sharding,
        context_size: int = Options.context_size,
        tensor_size: int = Options.tensor_size,
        loss_scaling: LossScaling = Options.loss_scaling,
        clip_groups: ClipGroups = Options.clip_groups,
        reshard_after_backward: bool = Options.reshard_after_backward,
        bucket_bytes: BucketBytes = Options.bucket_bytes,
        early_all_gather: bool = Options.early_all_gather,
        data_parallel_size: Size = Options.data_parallel_size,
        tensor_parallel_size: Size = Options.tensor_parallel_size,
        save_distributed_checkpoint: bool = Options.save_distributed_checkpoint,
        process_group_backend: str | None = Options.process_group_backend,
        timeout: timedelta = Options.timeout,
        max_silence: timedelta | None = Options.max_silence,
    ) -> None:
        self._trainings: list[Training] = []
        self._tokens: ReportedTokens | None = None
        super().__init__(from_arguments(Options, locals()))
        set_no_backward_sync(self, self._no_backward_sync)
        # Fabric has no end; the other ranks should know when this one has come to it.
        weakref.finalize(self, _end, self._trainings)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Divide the module. Collective over all ranks; every rank must call it."""
        assert self._meshes is not None, "fabric.launch() comes first"
        if self._meshes.tensor is not None:
            check_tensor_parallel(module, self._meshes.tensor)
        self._give_up(module)
        replaced = ReplacedParameters(module)
        options = replace(
            self.options.mode_options,
            mp_policy=mixed_precision_policy(self.precision.precision, module),
            wait_for_parameters=True,  # The loop is the user's, and may read weights right after a step.
        )
        mode = make_mode(self.options.sharding, self._mesh(), options)
        prepare(module, mode, device=self.root_device, package=self.package)
        replaced.close(module)
        module.to(self.root_device)
        training = Training(
            module,
            mode,
            replaced,
            clip_groups=self.options.clip_groups,
            max_skipped_steps=self.options.config.max_skipped_steps,
            max_silence=self.options.max_silence,
        )
        self._trainings.append(training)
        # Not this training: the module may be set up again.
        return Entry(module, partial(_around_forward, self._trainings, module))

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return what becomes of it. Collective over all ranks; every rank must call it."""
        try:
            return self._adopt(self._owner(optimizer), [optimizer], [])[0]
        except ValueError as error:
            error.add_note(
                "fabric.setup(module, *optimizers) takes several optimizers of a module together; of those given to "
                "fabric.setup_optimizers the one with matrices comes first."
            )
            raise

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[torch.optim.Optimizer], Any]:
        """Divide the module, and return what becomes of its optimizers. Collective over all ranks."""
        entry = self.setup_module(module)
        used = self._adopt(self._trainings[-1], optimizers, [] if scheduler is None else [scheduler])
        return entry, used, scheduler

    def report_tokens(self, num_tokens: int | Tensor) -> None:
        """Say how many tokens the loss that goes to ``fabric.backward`` next sums over; local.

        With ``loss_scaling="tokens"`` every rank calls it before each backward pass, with losses that are sums:
        gradients are divided by the number of tokens of all ranks and all micro-batches of the step.
        """
        if self._tokens is None:
            raise RuntimeError(
                f"report_tokens takes {type(self).__name__}(loss_scaling='tokens'), got loss_scaling="
                f"{self.options.loss_scaling!r}, and comes after fabric.setup(module, optimizer)"
            )
        self._tokens.report(num_tokens)

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Backward. Collective over all ranks, except inside of ``no_backward_sync``; every rank must call it."""
        if self._tokens is not None:
            self._tokens.begin_backward()
            last = [training for training in self._trainings if training.is_last_micro_batch]
            if last and any(training.is_accumulating for training in self._trainings):
                raise RuntimeError(
                    f"no_backward_sync of some models, but not of {type(last[0].module).__name__}: tokens are counted "
                    "for all models together (loss_scaling='tokens'), so their micro-batches begin and end together; "
                    "enter no_backward_sync of each of them"
                )
            for training in last:
                training.divide_gradients_by(self._tokens.divisor())
        with ExitStack() as stack:
            if self._tokens is not None:
                stack.enter_context(self._tokens.forgotten_on_failure())
            for training in self._trainings:
                stack.enter_context(training.around_backward())
            super().backward(tensor, module, *args, **kwargs)  # type: ignore[misc]

    def optimizer_step(self, optimizer: torch.optim.Optimizer, **kwargs: Any) -> Any:
        """Step. Collective over all ranks; every rank must call it."""
        training, current = self._training_of(optimizer)
        return training.step(current, self.precision.optimizer_step, **kwargs)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip by one norm, and return the norm before. Collective over all ranks; every rank must call it."""
        del module
        if float(norm_type) != 2.0:
            raise ValueError(f"clip_gradients takes norm_type=2.0, the norm over all shards, got {norm_type}")
        training, current = self._training_of(optimizer)
        norm = training.clip_by_norm(current, max_norm)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"the norm of the gradients is {norm.item()}; with clip_gradients(error_if_nonfinite=False) all ranks "
                "skip the step instead"
            )
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Clip element by element. Collective over all ranks; every rank must call it."""
        del module
        training, current = self._training_of(optimizer)
        training.clip_by_value(current, clip_val)

    def save_checkpoint(
        self,
        path: str | Path,
        state: Mapping[str, Any],
        storage_options: Any = None,
        filter: Filters | None = None,  # noqa: A002 - Fabric's name
    ) -> None:
        """Save as ``ModelParallelStrategy`` does. Collective over all ranks; every rank must call it."""
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} has no CheckpointIO that could take storage_options")
        metadata_name = metadata_filename(self.package) if self.options.save_distributed_checkpoint else None
        place = Path(self.broadcast(path))
        save(place, self._by_kind(state), self._mesh(), filters=filter or {}, metadata_name=metadata_name)

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
        checkpoint = StateCheckpoint.open(
            Path(self.broadcast(last_written(Path(path)))),
            metadata_name=metadata_filename(self.package),
            weights_only=weights_only,
        )
        remainder: dict[str, Any] = {}
        if isinstance(state, dict):
            remainder = checkpoint.load(self._by_kind(state), state, strict=strict)
        else:
            load_alone(checkpoint, self._by_kind({"": state}), strict=strict)
        for training in self._trainings:
            training.weights_have_changed()
        return remainder

    def teardown(self) -> None:
        """Remove all hooks; modules stay divided."""
        _close(self._trainings)
        self.precision.teardown()
        self.accelerator.teardown()
        self.cluster_environment.teardown()

    def _adopt(
        self, training: Training, given: Sequence[torch.optim.Optimizer], schedulers: Sequence[Any]
    ) -> list[torch.optim.Optimizer]:
        """Let the module train with ``given`` as well. Collective over all ranks; every rank must call it."""
        for optimizer in given:
            training.replaced.rebind(optimizer, training.module)
        before = [*training.optimizers, *given]
        conversions = convert_optimizers(before, schedulers, training.module, choice=self.options.optimizer)
        kinds = [(f"optimizer {index}", conversion.summary) for index, conversion in enumerate(conversions)]
        require_equal(kinds, None, "the optimizers that were set up")
        after = [conversion.optimizer for conversion in conversions]
        handles = [OptimizerProxy(old, new) for old, new in zip(before, after, strict=True) if new is not old]
        training.attach(after, handles)
        if self.options.loss_scaling == "tokens" and self._tokens is None:
            self._tokens = ReportedTokens(self._mesh())
        fresh = conversions[len(before) - len(given) :]
        rank_zero = self.package.fabric("utilities.rank_zero")
        rank_zero.rank_zero_info(describe_optimizers(fresh))
        if len(fresh) == len(conversions) and (note := training.gradient_note):
            rank_zero.rank_zero_info(note)
        for message in optimizer_warnings(fresh, self.options.optimizer):
            rank_zero.rank_zero_warn(message)
        return after[len(before) - len(given) :]

    def _owner(self, optimizer: torch.optim.Optimizer) -> Training:
        """The module that ``optimizer`` steps."""
        for training in self._trainings:
            training.replaced.rebind(optimizer, training.module)
        owners = [training for training in self._trainings if training.holds(optimizer)]
        if len(owners) != 1:
            names = " and ".join(type(training.module).__name__ for training in owners) or "no module"
            raise ValueError(
                f"{type(optimizer).__name__} has parameters of {names} that was set up before it; set up the module "
                "first, and give each module optimizers of its own"
            )
        return owners[0]

    def _training_of(self, optimizer: torch.optim.Optimizer) -> tuple[Training, torch.optim.Optimizer]:
        for training in self._trainings:
            current = training.current(optimizer)
            if current is not None:
                return training, current
        raise ValueError(
            f"this {type(optimizer).__name__} was not set up; use what fabric.setup or fabric.setup_optimizers has "
            "returned"
        )

    def _by_kind(self, state: Mapping[str, Any]) -> State:
        """What is to be saved or loaded."""
        trainings = {id(training.module): training for training in self._trainings}
        result = State()
        for key, value in state.items():
            if isinstance(value, nn.Module):
                module = unwrapped(value)
                training = trainings.get(id(module))
                result.modules[key] = (module, training.optimizers if training is not None else [])
            elif isinstance(value, torch.optim.Optimizer):
                training, current = self._training_of(value)
                result.optimizers[key] = (training.module, current)
            else:
                result.rest[key] = value
        return result

    def _no_backward_sync(self, module: nn.Module) -> AbstractContextManager[None]:
        training = _training_with(self._trainings, unwrapped(module))
        if training is None:
            raise ValueError(
                f"no_backward_sync of a {type(module).__name__} that this Fabric does not train (any more)"
            )
        return training.no_sync()

    def _give_up(self, module: nn.Module) -> None:
        """End what trains ``module`` so far, which is set up again; local.

        Raises:
            ValueError: If it shares parameters with another module that is trained.
        """
        before = _training_with(self._trainings, module)
        if before is not None:
            before.close()
            self._trainings.remove(before)
        for training in self._trainings:
            if training.optimizers and not set(module.parameters()).isdisjoint(training.module.parameters()):
                raise ValueError(
                    f"{type(module).__name__} shares parameters with {type(training.module).__name__}, which has been "
                    "set up with optimizers of its own; set up one module that holds all parameters they share"
                )


def _training_with(trainings: Sequence[Training], module: nn.Module) -> Training | None:
    return next((training for training in trainings if training.module is module), None)


def _around_forward(trainings: Sequence[Training], module: nn.Module) -> AbstractContextManager[None]:
    training = _training_with(trainings, module)
    return nullcontext() if training is None else training.around_forward()


def _end(trainings: list[Training]) -> None:
    for training in trainings:
        training.program_ends()
    _close(trainings)


def _close(trainings: list[Training]) -> None:
    while trainings:
        trainings.pop().close()
