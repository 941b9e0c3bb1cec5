"""The sharding modes by name, and the two that shard nothing: a single process, and replicas (DDP)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.comm.groups import axis_group
from lightning_muon.grad_sync.reducer import BUCKET_BYTES, GradientReducer
from lightning_muon.grad_sync.transports import AllReduce, Results
from lightning_muon.params.layout import TensorLayout
from lightning_muon.sharding.fsdp import Fsdp
from lightning_muon.sharding.mode import ModeOptions, ShardingMode, attach_optimizers
from lightning_muon.sharding.weights import names_of, replicate_model
from lightning_muon.sharding.zero2 import Zero2


class SingleProcess(ShardingMode):
    """The model as it is; a mesh of more than one rank is an error, since the ranks would drift apart."""

    name = "none"
    shards_weights = False

    def __init__(self, mesh: DeviceMesh, options: ModeOptions) -> None:
        super().__init__(mesh, options)
        self._divisor: float | None = None
        self._results = Results()

    def prepare(self, module: nn.Module) -> None:
        """Check that there is one rank; local."""
        del module
        if self.mesh.size() > 1:
            raise ValueError(
                f"sharding='none' communicates no gradients, but there are {self.mesh.size()} data-parallel ranks; use "
                "'ddp', 'zero2' or 'fsdp', or one device"
            )

    def attach(self, module: nn.Module, optimizers: Sequence[Any]) -> None:
        """Create the state; local."""
        attach_optimizers(module, optimizers, layout=None)
        self._module = module

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def set_gradient_divisor(self, divisor: float | None) -> None:
        """Remember it."""
        self._divisor = divisor

    def finish_gradients(self) -> None:
        """Divide the gradients; local.

        Raises:
            ValueError: If backward has added to gradients that are divided already.
        """
        if self._divisor is None:
            return
        for parameter in self._module.parameters():
            if parameter.grad is None or self._results.is_untouched(parameter):
                continue
            if self._results.holds(parameter):
                raise ValueError(
                    f"gradients that were divided by {self._divisor} have been changed since; call "
                    "zero_grad(set_to_none=True) before the next backward pass, and finish_gradients() before clipping"
                )
            parameter.grad.div_(self._divisor)
            self._results.keep(parameter)

    def close(self) -> None:
        """Remove the hooks; local."""
        self._end_watch()


class Ddp(ShardingMode):
    """Replicas; a ParallelMuon still orthogonalizes each matrix on one rank only."""

    name = "ddp"
    shards_weights = False
    takes = frozenset({"bucket_bytes"})

    def __init__(self, mesh: DeviceMesh, options: ModeOptions) -> None:
        super().__init__(mesh, options)
        self._reducer: GradientReducer | None = None
        self._layout = TensorLayout(mesh)

    def prepare(self, module: nn.Module) -> None:
        """As in :class:`ShardingMode`."""
        replicate_model(module, self.mesh, self.name)

    def attach(self, module: nn.Module, optimizers: Sequence[Any]) -> None:
        """As in :class:`ShardingMode`."""
        everyone = axis_group(self.mesh, tuple(range(self.mesh.ndim)))
        named = names_of(module)
        self._reducer = GradientReducer(
            list(named.values()),
            AllReduce(everyone),
            everyone,
            names={parameter: name for name, parameter in named.items()},
            bucket_bytes=BUCKET_BYTES if self.options.bucket_bytes == "auto" else self.options.bucket_bytes,
        )
        attach_optimizers(module, optimizers, self._layout, step=self._reducer.step)

    def no_sync(self) -> AbstractContextManager[None]:
        """As in :class:`ShardingMode`."""
        assert self._reducer is not None, "attach comes first"
        return self._reducer.no_sync()

    def set_gradient_divisor(self, divisor: float | None) -> None:
        """As in :class:`ShardingMode`."""
        assert self._reducer is not None, "attach comes first"
        self._reducer.set_divisor(self.mesh.size() if divisor is None else divisor)

    def backward_failed(self) -> None:
        """As in :class:`ShardingMode`."""
        if self._reducer is not None:
            self._reducer.give_up()

    def finish_gradients(self) -> None:
        """As in :class:`ShardingMode`."""
        assert self._reducer is not None, "attach comes first"
        self._layout.agreed = self._reducer.finish()
        self._note_step()

    def close(self) -> None:
        """As in :class:`ShardingMode`."""
        self._end_watch()
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None


Sharding = Literal["fsdp", "zero2", "ddp", "none"]
MODES: dict[str, type[ShardingMode]] = {mode.name: mode for mode in (Fsdp, Zero2, Ddp, SingleProcess)}


def make_mode(name: str, mesh: DeviceMesh, options: ModeOptions) -> ShardingMode:
    """The mode that users call ``name``.

    Raises:
        ValueError: For an unknown name.
    """
    check_mode(name)
    return MODES[name](mesh, options)


def check_mode(name: str) -> None:
    """Raise ``ValueError`` for an unknown name."""
    if name not in MODES:
        raise ValueError(f"sharding must be one of {tuple(MODES)}, got {name!r}")
