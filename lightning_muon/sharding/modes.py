"""The sharding modes by name, and that of a single process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_muon.sharding.base import ModeOptions, ShardingMode, attach_optimizers
from lightning_muon.sharding.ddp import Ddp, Results
from lightning_muon.sharding.fsdp import Fsdp
from lightning_muon.sharding.zero2 import Zero2


class SingleProcess(ShardingMode):
    """Leaves the model as it is; a mesh of more than one rank is an error, since the ranks would drift apart."""

    name = "none"
    shards_weights = False
    takes = frozenset({"roots"})

    def __init__(self, mesh: DeviceMesh, options: ModeOptions) -> None:
        super().__init__(mesh, options)
        self._results = Results()

    @override
    def prepare(self, module: nn.Module) -> None:
        if self.mesh.size() > 1:
            raise ValueError(
                f"sharding='none' communicates no gradients, but there are {self.mesh.size()} data-parallel ranks; use "
                "'ddp', 'zero2' or 'fsdp', or one device"
            )

    @override
    def attach(self, module: nn.Module, optimizers: Sequence[Any]) -> None:
        attach_optimizers(module, optimizers, layout=None)
        self._module = module

    @override
    def pass_failed(self) -> None:
        """Nothing: without other ranks a batch can be left out."""

    @override
    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def finish_gradients(self) -> None:
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
            self._results.keep(parameter, parameter.grad.div_(self._divisor))


Sharding = Literal["fsdp", "zero2", "ddp", "none"]
MODES: dict[str, type[ShardingMode]] = {mode.name: mode for mode in (Fsdp, Zero2, Ddp, SingleProcess)}


def make_mode(name: str, mesh: DeviceMesh, options: ModeOptions) -> ShardingMode:
    """Make the mode called ``name``."""
    if name not in MODES:
        raise ValueError(f"sharding must be one of {tuple(MODES)}, got {name!r}")
    return MODES[name](mesh, options)
