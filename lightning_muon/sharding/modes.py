"""The sharding modes by name, and the two that shard nothing: a single process, and replicas (DDP)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_muon.comm.groups import axis_group
from lightning_muon.grad_sync.reducer import BUCKET_BYTES
from lightning_muon.grad_sync.transports import AllReduce, Results
from lightning_muon.params.layout import Layout
from lightning_muon.sharding.fsdp import Fsdp
from lightning_muon.sharding.mode import ModeOptions, ReplicatedWeights, ShardingMode, attach_optimizers
from lightning_muon.sharding.weights import names_of
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


class Ddp(ReplicatedWeights):
    """Replicas; a ParallelMuon still orthogonalizes each matrix on one rank only."""

    name = "ddp"
    takes = frozenset({"bucket_bytes"})

    def __init__(self, mesh: DeviceMesh, options: ModeOptions) -> None:
        super().__init__(mesh, options)
        self._layout = Layout(mesh)

    @override
    def attach(self, module: nn.Module, optimizers: Sequence[Any]) -> None:
        everyone = axis_group(self.mesh, tuple(range(self.mesh.ndim)))
        chosen = self.options.bucket_bytes
        bucket_bytes = BUCKET_BYTES if chosen == "auto" else chosen
        reducer = self._watch_gradients(names_of(module), AllReduce(everyone), everyone, bucket_bytes)
        attach_optimizers(module, optimizers, self._layout, step=reducer.step)

    @override
    def finish_gradients(self) -> None:
        self._layout.agreed = self._reducer.finish()
        self._note_step()


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
