"""``sharding="ddp"``: every rank has all of the model; gradients are averaged while backward runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.comm.mesh import axis_group
from lightning_muon.grad_sync.all_reduce import AllReduce
from lightning_muon.grad_sync.buckets import BUCKET_BYTES
from lightning_muon.grad_sync.reducer import GradientReducer
from lightning_muon.params.layout import TensorLayout
from lightning_muon.sharding.modes.mode import ModeOptions, ShardingMode, attach_optimizers
from lightning_muon.sharding.replicas import names_of, replicate_model


class Ddp(ShardingMode):
    """Replicas; a ParallelMuon still orthogonalizes each matrix on one rank only."""

    name = "ddp"
    divides_weights = False
    takes = frozenset({"bucket_bytes"})

    def __init__(self, mesh: DeviceMesh, options: ModeOptions) -> None:
        super().__init__(mesh, options)
        self._reducer: GradientReducer | None = None

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
        attach_optimizers(module, optimizers, TensorLayout(self.mesh))

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
        self._reducer.finish()
        self._note_step()

    def close(self) -> None:
        """As in :class:`ShardingMode`."""
        self._end_watch()
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None
