"""The sharding modes with everything whole on every rank: a single process, and replicas (DDP)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_muon.comm.collectives import start_all_reduce_sum
from lightning_muon.comm.groups import AxisGroup, axis_group, own_group
from lightning_muon.params.layout import Layout
from lightning_muon.sharding.base import ModeOptions, ShardingMode, attach_optimizers
from lightning_muon.sharding.reducer import (
    BUCKET_BYTES,
    GradientBucket,
    GradientReducer,
    Parameters,
    Results,
    flat_gradient,
)
from lightning_muon.sharding.shard_model import agree_on_units, check_layers, check_meta
from lightning_muon.sharding.weights import broadcast_initial_state, names_of


class SingleProcess(ShardingMode):
    """Leaves the model as it is; a mesh of more than one rank is an error, since the ranks would drift apart."""

    name = "none"
    shards_weights = False
    takes = frozenset({"roots"})

    def __init__(self, mesh: DeviceMesh, options: ModeOptions) -> None:
        super().__init__(mesh, options)
        self._divisor: float | None = None
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
    def set_gradient_divisor(self, divisor: float | None) -> None:
        self._divisor = divisor

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


class AllReducedBucket(GradientBucket):
    """One all-reduce over ``group``; the sums are views of its buffer."""

    kind = "all_reduce"

    def __init__(self, parameters: Parameters, group: AxisGroup) -> None:
        super().__init__(parameters)
        self._group = group

    def pack(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """What travels of the gradients, one flat tensor. Local."""
        return torch.cat(list(map(flat_gradient, self.parameters, gradients)))

    @override
    def reduce(self, gradients: Sequence[Tensor | None]) -> None:
        self._buffer = self.pack(gradients)
        self._work = None if self._group.group is None else start_all_reduce_sum(self._buffer, self._group)

    @override
    def gradients(self, divisor: float) -> list[Tensor]:
        if self._work is not None:
            self._work.wait()
        if divisor != 1:
            self._buffer.div_(divisor)
        parts = self._buffer.split([parameter.numel() for parameter in self.parameters])
        del self._buffer, self._work  # The memory is freed with the gradients.
        return [part.view(parameter.shape) for parameter, part in zip(self.parameters, parts, strict=True)]


class Ddp(ShardingMode):
    """Whole weights on every rank; a reducer sums gradients while backward runs."""

    name = "ddp"
    shards_weights = False
    takes = frozenset({"bucket_bytes"})
    bucket: ClassVar[type[AllReducedBucket]] = AllReducedBucket
    _reducer: GradientReducer | None = None

    @cached_property
    def _everyone(self) -> AxisGroup:
        return axis_group(self.mesh, tuple(range(self.mesh.ndim)))

    @override
    def prepare(self, module: nn.Module) -> None:
        def check() -> list[nn.Module]:
            check_layers(module)
            check_meta(module)
            for name, parameter in names_of(module).items():
                if isinstance(parameter, DTensor):
                    raise ValueError(
                        f"{name} {tuple(parameter.shape)} is a DTensor already, but sharding={self.name!r} keeps whole "
                        "plain weights on every rank. If an earlier fit has sharded this module, make it anew, or load "
                        "full_state_dict into a new one; else remove fully_shard and parallelize_module from "
                        "configure_model, or use sharding='fsdp'"
                    )
                if parameter.is_meta:
                    raise ValueError(f"{name} {tuple(parameter.shape)} is on the meta device; materialize it first")
            return []

        agree_on_units(module, check, [self._everyone])
        for parameter in module.parameters():
            if not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()
        broadcast_initial_state(module, self.mesh)

    def reduce_by(self, make_bucket: Callable[[Parameters], GradientBucket], module: nn.Module) -> GradientReducer:
        """Reduce the gradients of the module's parameters in such buckets from now on. Collective over the mesh."""
        chosen = self.options.bucket_bytes
        bucket_bytes = BUCKET_BYTES if chosen == "auto" else chosen
        names = {parameter: name for name, parameter in names_of(module).items()}
        self._results = Results()
        self._reducer = GradientReducer(
            list(names), make_bucket, self._everyone, results=self._results, names=names, bucket_bytes=bucket_bytes
        )
        return self._reducer

    @override
    def attach(self, module: nn.Module, optimizers: Sequence[Any]) -> None:
        group = own_group(self._everyone)
        self.reduce_by(lambda parameters: self.bucket(parameters, group), module)
        self.layout = Layout(self.mesh)
        attach_optimizers(module, optimizers, self.layout)

    @override
    def no_sync(self) -> AbstractContextManager[None]:
        return self.attached(self._reducer).no_sync()

    @override
    def set_gradient_divisor(self, divisor: float | None) -> None:
        self.attached(self._reducer).set_divisor(self.mesh.size() if divisor is None else divisor)

    @override
    def finish_gradients(self) -> None:
        reducer = self.attached(self._reducer)
        self.require_no_failure()
        self.keep(reducer.finish())

    def keep(self, sums: Mapping[Tensor, Tensor]) -> None:
        """Make sums of gradients available to clipping and optimizers. Local."""
        for parameter, gradient in sums.items():
            self._results.keep(parameter, gradient)

    @override
    def close(self) -> None:
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None
