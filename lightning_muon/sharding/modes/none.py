"""``sharding="none"``: no division and no communication, for one process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.sharding.modes.mode import ModeOptions, ShardingMode, attach_optimizers


class Undivided(ShardingMode):
    """The model as it is; a mesh of more than one rank is an error, since the ranks would drift apart."""

    name = "none"
    divides_weights = False

    def __init__(self, mesh: DeviceMesh, options: ModeOptions) -> None:
        super().__init__(mesh, options)
        self._divisor: float | None = None

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
        """Divide the gradients; local."""
        if self._divisor is not None:
            for parameter in self._module.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(self._divisor)

    def close(self) -> None:
        """Nothing."""
