"""``sharding="none"``: no division and no communication, for one process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.grad_sync.results import Results
from lightning_muon.sharding.modes.mode import ModeOptions, ShardingMode, attach_optimizers


class Undivided(ShardingMode):
    """The model as it is; a mesh of more than one rank is an error, since the ranks would drift apart."""

    name = "none"
    divides_weights = False

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
