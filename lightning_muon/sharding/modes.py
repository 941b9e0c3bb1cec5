"""The sharding modes by name, and those with whole weights on every rank: a single process, replicas (DDP), ZeRO-2."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_muon.comm.groups import AxisGroup, axis_group
from lightning_muon.grad_sync.parameter_all_gather import ParameterAllGather
from lightning_muon.grad_sync.reducer import BUCKET_BYTES, GradientReducer
from lightning_muon.grad_sync.shard_map import ShardMap, place_shards
from lightning_muon.grad_sync.sharded_layout import ShardedLayout
from lightning_muon.grad_sync.transports import AllReduce, ReduceScatterToOwners, Results, Transport
from lightning_muon.math.newton_schulz import Arithmetic, NewtonSchulzOptions
from lightning_muon.params.layout import Layout
from lightning_muon.params.logical import logical_matrices
from lightning_muon.sharding.base import ModeOptions, ShardingMode, attach_optimizers, is_attachable
from lightning_muon.sharding.fsdp import Fsdp
from lightning_muon.sharding.shard_model import agree_on_units, check_layers, check_meta, find_units, units_of
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
            parameter.grad.div_(self._divisor)
            self._results.keep(parameter)


class Ddp(ShardingMode):
    """Whole weights on every rank; a reducer sums gradients while backward runs."""

    name = "ddp"
    shards_weights = False
    takes = frozenset({"bucket_bytes"})
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

    def _watch_gradients(self, module: nn.Module, transport: Transport) -> GradientReducer:
        """Make the reducer that sums gradients. Collective over the mesh."""
        chosen = self.options.bucket_bytes
        bucket_bytes = BUCKET_BYTES if chosen == "auto" else chosen
        names = {parameter: name for name, parameter in names_of(module).items()}
        reducer = GradientReducer(list(names), transport, self._everyone, names=names, bucket_bytes=bucket_bytes)
        self._reducer = reducer
        return reducer

    @override
    def attach(self, module: nn.Module, optimizers: Sequence[Any]) -> None:
        self._watch_gradients(module, AllReduce(self._everyone))
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
        reducer.finish()
        if self.call_log is not None:
            self.call_log.restart()

    @override
    def close(self) -> None:
        super().close()
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None


class Zero2(Ddp):
    """Whole weights; gradients and optimizer state in shards over the last axis of the mesh.

    The gradient of a matrix is reduced to its owner, which orthogonalizes it without a gather; those of all others are
    sharded by rows. New values are sent back while the next forward already runs.

    Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5 (stage 2); here with whole matrices as parts.
    """

    name = "zero2"
    parameters_arrive_late = True
    takes = frozenset({"bucket_bytes", "wrap_policy"})
    _all_gather: ParameterAllGather | None = None
    _root_parameters: Sequence[Tensor] = ()

    @override
    def attach(self, module: nn.Module, optimizers: Sequence[Any]) -> None:
        used = [optimizer for optimizer in optimizers if any(group["params"] for group in optimizer.param_groups)]
        for optimizer in used:
            if not is_attachable(optimizer):
                raise ValueError(
                    f"sharding='zero2' divides the gradients that {type(optimizer).__name__} reads whole; use "
                    "ParallelMuon (with algorithm='adamw' for AdamW alone), or sharding='fsdp' or 'ddp'"
                )
        parameters = list(names_of(module).values())
        matrices = _flops_of_whole_matrices(used)
        shard_map = ShardMap(self.mesh, place_shards(parameters, matrices, self.mesh.size(-1)))
        transport = ReduceScatterToOwners(shard_map)
        reducer = self._watch_gradients(module, transport)
        units = units_of(module, find_units(module, self.options.wrap_policy))
        self._root_parameters = units[module]
        # A step first updates buckets without matrices, such as the embedding, which the next forward needs first.
        buckets = sorted(reducer.buckets, key=lambda bucket: not matrices.keys().isdisjoint(bucket))
        self._all_gather = ParameterAllGather(shard_map, buckets, units, transport.shard)
        self.layout = ShardedLayout(shard_map, transport, self._all_gather)
        attach_optimizers(module, used, self.layout)

    @override
    def begin_forward(self) -> None:
        super().begin_forward()
        # Parameters in no unit have no forward that waits for them.
        if self._all_gather is not None:
            self._all_gather.wait(self._root_parameters)

    @override
    def end_step(self) -> None:
        if self.options.wait_for_parameters:
            self.finish_parameters()

    @override
    def finish_parameters(self) -> None:
        if self._all_gather is not None:
            self._all_gather.wait_all()

    @override
    def close(self) -> None:
        super().close()
        all_gather, self._all_gather, self.layout = self._all_gather, None, Layout()
        if all_gather is not None:
            # Waits for values on their way; raises if they do not arrive, because other ranks are gone.
            all_gather.close()


def _flops_of_whole_matrices(optimizers: Sequence[Any]) -> dict[Tensor, int]:
    """Parameters that one rank must own -> FLOPs of their step; not stacks, whose rows are whole matrices."""
    found: dict[Tensor, int] = {}
    for optimizer in optimizers:
        routes = iter(optimizer.routes)
        for group in optimizer.param_groups:
            for parameter, route in zip(group["params"], routes, strict=False):
                matrices = logical_matrices(tuple(parameter.shape), route)
                options, arithmetic = NewtonSchulzOptions.of(group), Arithmetic(parameter.device.type, torch.bfloat16)
                flops = sum(options.flops(each.rows, each.cols, arithmetic) for each in matrices)
                if flops and route.kind != "stack":
                    found[parameter] = flops
    return found


Sharding = Literal["fsdp", "zero2", "ddp", "none"]
MODES: dict[str, type[ShardingMode]] = {mode.name: mode for mode in (Fsdp, Zero2, Ddp, SingleProcess)}


def make_mode(name: str, mesh: DeviceMesh, options: ModeOptions) -> ShardingMode:
    """Make the mode called ``name``."""
    if name not in MODES:
        raise ValueError(f"sharding must be one of {tuple(MODES)}, got {name!r}")
    return MODES[name](mesh, options)
