"""The strategies ``"parallel_muon"`` and ``"flexdemo"`` of Fabric, for either of its packages; see the registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.checkpoint.loading import Checkpoint
from lightning_muon.checkpoint.saving import Filters, OptimizerState, Weights
from lightning_muon.checkpoint.staging import local_path
from lightning_muon.compat.lightning import metadata_filename, set_no_backward_sync
from lightning_muon.config import takes_options
from lightning_muon.engine.model_setup import SUPPORTED, register_steps, require_precision
from lightning_muon.engine.options import Options
from lightning_muon.engine.session import Session
from lightning_muon.integrations.strategy import MuonStrategy
from lightning_muon.params.layout import parameters_of

_SOURCE = "the optimizers that were set up"


@takes_options(Options)
class FabricStrategy(MuonStrategy):
    """Trains the modules of a Fabric program with FSDP2 hybrid sharding and ParallelMuon.

    The base class beside it is the ``ModelParallelStrategy`` of one package of Fabric: launcher, process group and
    collectives are Fabric's. Its arguments are the fields of :class:`~lightning_muon.Options`.

    Example::

        fabric = Fabric(accelerator="cpu", devices=4, strategy=ParallelMuonFabricStrategy(replicate_size=2))
        fabric.launch()
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    """

    user = "Fabric"
    of_base: ClassVar[Mapping[str, Any]] = {"parallelize_fn": lambda module, _: module}
    # Of the class beside it.
    cluster_environment: Any
    broadcast: Callable[..., Any]

    @property
    def precision(self) -> Any:
        """Fabric's precision plugin."""
        return super().precision  # type: ignore[misc]

    @precision.setter
    def precision(self, plugin: Any) -> None:
        name = str(getattr(plugin, "precision", SUPPORTED[0]))
        require_precision(name, f"Fabric(precision={name!r})")
        super(FabricStrategy, type(self)).precision.fset(self, plugin)  # type: ignore[attr-defined]

    @property
    def device_mesh(self) -> DeviceMesh:
        """Axes ``("replicate", "shard")``, then ``"context"`` and ``"tensor"`` where they are larger than 1."""
        if self._session.meshes is None:
            raise RuntimeError("there is no device mesh before fabric.launch()")
        return self._session.meshes.user

    def setup_environment(self) -> None:
        """Start the process group and make the mesh. Collective over all ranks."""
        self.accelerator.setup_device(self.root_device)
        self._start_processes()
        set_no_backward_sync(self, self._no_backward_sync)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard the module. Collective over all ranks."""
        # The loop is the user's, and may read weights right after a step.
        engine = self._shard(module, self.precision, wait_for_parameters=True, is_only_module=False)
        if engine.pipeline is not None:
            engine.pipeline.context.forward_context = self.precision.forward_context
        # ``generate`` of models inside of the module; a method of the module itself goes through Entry.
        for child in module.children():
            register_steps(child)
        return Entry(module, self._session)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return what becomes of it. Collective over all ranks."""
        for engine in self._session.engines:
            engine.rebind([optimizer])
        parameters = parameters_of(optimizer)
        owners = [each for each in self._session.engines if not set(each.module.parameters()).isdisjoint(parameters)]
        if len(owners) != 1:
            names = " and ".join(type(engine.module).__name__ for engine in owners) or "no module"
            raise ValueError(
                f"{type(optimizer).__name__} has parameters of {names} that was set up before it; set it up first"
            )
        return owners[0].attach([optimizer], source=_SOURCE)[0]

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[torch.optim.Optimizer], Any]:
        """Shard the module, and return what becomes of its optimizers. Collective over all ranks."""
        entry = self.setup_module(module)
        return entry, self._session.engines[-1].attach(optimizers, source=_SOURCE), scheduler

    def report_tokens(self, num_tokens: int | Tensor) -> None:
        """Say how many tokens the loss that goes to ``fabric.backward`` next sums over; local.

        With ``loss_scaling="tokens"`` every rank calls it before each backward pass, with losses that are sums:
        gradients are divided by the number of tokens of all ranks and all micro-batches of the step.
        """
        self._session.report_tokens(num_tokens)

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Backward. Collective over all ranks, except inside of ``no_backward_sync``."""
        with self._session.around_backward():
            super().backward(tensor, module, *args, **kwargs)  # type: ignore[misc]

    def optimizer_step(self, optimizer: torch.optim.Optimizer, **kwargs: Any) -> Any:
        """Step. Collective over all ranks."""
        engine, current = self._session.engine_of(optimizer)
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
        engine, current = self._session.engine_of(optimizer)
        norm = engine.clip_by_norm(parameters_of(current), max_norm, norm_type)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"the norm of the gradients is {norm.item()}; clip_gradients(error_if_nonfinite=False) skips the step"
            )
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Clip element by element. Collective over all ranks."""
        engine, current = self._session.engine_of(optimizer)
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
        whole, target = self._session.saves_one_file, local_path(self.broadcast(path))
        metadata_name = metadata_filename(self.package)
        self._session.save({target: self._parts(state)}, whole=whole, metadata_name=metadata_name, filters=filter)

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
            return self._session.load(checkpoint, self._parts(state), state, strict=strict)
        if checkpoint.is_sharded:
            raise ValueError(
                f"{checkpoint.path} is a directory of shards: fabric.load(path, state), with the keys of fabric.save"
            )
        checkpoint.content = {"": checkpoint.content}  # A file that is the state dict of one object.
        return self._session.load(checkpoint, self._parts({"": state}), {}, strict=strict)

    def teardown(self) -> None:
        """Remove all hooks; modules stay sharded."""
        self._session.close()
        self.precision.teardown()
        self.accelerator.teardown()
        self.cluster_environment.teardown()

    def _parts(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return {key: self._part(value) for key, value in state.items()}

    def _part(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            assert self._session.meshes is not None, "fabric.launch() comes first"
            engine = self._session.engine_with(own := _own(value))
            return Weights(own, self._session.meshes.data) if engine is None else engine.weights
        if isinstance(value, torch.optim.Optimizer):
            engine, current = self._session.engine_of(value)
            return OptimizerState(engine.module, current)
        return value

    def _no_backward_sync(self, module: nn.Module) -> AbstractContextManager[None]:
        engine = self._session.engine_with(_own(module))
        if engine is None:
            raise ValueError(
                f"no_backward_sync of a {type(module).__name__} that this Fabric does not train (any more)"
            )
        return engine.no_sync()


def _own(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, Entry) else module


class Entry(nn.Module):
    """Calls ``module``: Fabric sends ``fabric_model.method(...)`` through the forward of what is around it.

    Calling a method on the module itself would find shards where FSDP2 has not gathered the weights.
    """

    def __init__(self, module: nn.Module, session: Session) -> None:
        super().__init__()
        self.module = module
        self._session = session

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        engine = self._session.engine_with(self.module)  # The module may have been set up again.
        has_grad = torch.is_grad_enabled()
        with (
            nullcontext() if engine is None else engine.around_forward(),
            # Tensors into which FSDP2 gathers weights in inference mode could not be used later.
            torch.inference_mode(False),
            torch.set_grad_enabled(has_grad),
        ):
            return self.module(*args, **kwargs)
