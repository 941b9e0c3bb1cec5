"""``sharding="zero2"``: whole weights on every rank; gradients and optimizer state divided over the shard axis.

Gradients are reduced during backward to the rank that needs them: a matrix to its owner, who then orthogonalizes it
without any gather, and rows of everything else. New values travel back while the next forward already runs.

Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5 (stage 2); here with whole matrices as parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_muon.comm.agreement import gather
from lightning_muon.comm.groups import AxisGroup, axis_group, host_group, make_hops, nodes_of
from lightning_muon.grad_sync.parameter_all_gather import ParameterAllGather, units_of
from lightning_muon.grad_sync.reducer import BUCKET_BYTES
from lightning_muon.grad_sync.shard_map import ShardMap, place_shards
from lightning_muon.grad_sync.sharded_layout import ShardedLayout
from lightning_muon.grad_sync.transports import ReduceScatterToOwners
from lightning_muon.math.newton_schulz import newton_schulz_flops
from lightning_muon.params.layout import Layout
from lightning_muon.params.logical import logical_matrices
from lightning_muon.params.routing import Route
from lightning_muon.schedule.cost import PRESETS
from lightning_muon.schedule.estimates import Grid, ShardExchange, choose_exchange, node_grid
from lightning_muon.sharding.mode import Attachable, ModeOptions, ReplicatedWeights, attach_optimizers
from lightning_muon.sharding.units import find_units
from lightning_muon.sharding.weights import names_of


class Zero2(ReplicatedWeights):
    """Shards over the last axis of the mesh; replicas, the other axis, sum their parts once more."""

    name = "zero2"
    parameters_arrive_late = True
    takes = frozenset({"bucket_bytes", "wrap_policy"})

    def __init__(self, mesh: DeviceMesh, options: ModeOptions) -> None:
        super().__init__(mesh, options)
        self._layout: ShardedLayout | None = None
        self._all_gather: ParameterAllGather | None = None
        self._root_parameters: Sequence[Tensor] = ()

    @override
    def attach(self, module: nn.Module, optimizers: Sequence[Any]) -> None:
        used = [optimizer for optimizer in optimizers if any(group["params"] for group in optimizer.param_groups)]
        for optimizer in used:
            if not isinstance(optimizer, Attachable):
                raise ValueError(
                    f"sharding='zero2' divides the gradients that {type(optimizer).__name__} reads whole; use "
                    "ParallelMuon (with algorithm='adamw' for AdamW alone), or sharding='fsdp' or 'ddp'"
                )
        named = names_of(module)
        parameters = list(named.values())
        matrices = dict(_whole_matrices(used))
        shard_map = ShardMap(self.mesh, place_shards(parameters, matrices, self.mesh.size(-1)))
        everyone = axis_group(self.mesh, tuple(range(self.mesh.ndim)))
        exchange, grid = self._choose_exchange(everyone, parameters)
        gradients = ReduceScatterToOwners(shard_map, grid)
        reducer = self._watch_gradients(named, gradients, everyone, exchange.bucket_bytes)
        units = units_of(module, find_units(module, self.options.wrap_policy))
        self._root_parameters = units[module]
        # A step updates what has no matrices first, the embedding among it, which the next forward needs first.
        buckets = sorted(reducer.buckets, key=lambda bucket: not matrices.keys().isdisjoint(bucket))
        self._all_gather = ParameterAllGather(shard_map, buckets, make_hops(shard_map.shard, grid), units)
        self._layout = ShardedLayout(shard_map, reducer, gradients, self._all_gather)
        attach_optimizers(module, used, self._layout, step=reducer.step)

    def _choose_exchange(self, everyone: AxisGroup, parameters: Sequence[Tensor]) -> tuple[ShardExchange, Grid]:
        """How gradients and values travel, equal on all ranks, and the grid of this rank's replica.

        Collective over ``everyone``; every rank must call it.
        """
        replicas: dict[tuple[int, ...], list[int]] = {}
        for coordinate, node in sorted(zip(everyone.coordinates, nodes_of(everyone), strict=True)):
            replicas.setdefault(coordinate[:-1], []).append(node)
        trained = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
        if everyone.group is not None:
            trained = max(gather(trained, host_group(everyone).group))
        chosen = self.options.bucket_bytes
        exchange = choose_exchange(
            list(replicas.values()),
            trained,
            PRESETS["h100"],
            bucket_bytes=BUCKET_BYTES if chosen == "auto" else chosen,
            may_grow=chosen == "auto" and self.mesh.device_type == "cuda",
        )
        return exchange, node_grid(replicas[everyone.coordinates[everyone.rank][:-1]]) if exchange.grid else ()

    @property
    @override
    def layout(self) -> Layout:
        return self._attached_layout

    @property
    def _attached_layout(self) -> ShardedLayout:
        assert self._layout is not None, "attach comes first"
        return self._layout

    @override
    def finish_gradients(self) -> None:
        self._attached_layout.finish_gradients()
        self._note_step()

    @override
    def begin_forward(self) -> None:
        # What belongs to no unit has no forward that waits for it.
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
        """Remove all hooks; takes the values that still arrive.

        Raises:
            RuntimeError: If they do not arrive, because other ranks are gone.
        """
        super().close()
        all_gather, self._all_gather, self._layout = self._all_gather, None, None
        if all_gather is not None:
            all_gather.close()


def _whole_matrices(optimizers: Sequence[Attachable]) -> Iterator[tuple[Tensor, int]]:
    """Parameters that one rank shall own, and the FLOPs of their step. The matrices of a stack are rows of it."""
    for optimizer in optimizers:
        routes = iter(optimizer.routes)
        for group in optimizer.param_groups:
            for parameter, route in zip(group["params"], routes, strict=False):
                flops = _flops(tuple(parameter.shape), route, group["ns_steps"])
                if flops and route.kind != "stack":
                    yield parameter, flops


def _flops(shape: tuple[int, ...], route: Route, num_steps: int) -> int:
    return sum(newton_schulz_flops(matrix.rows, matrix.cols, num_steps) for matrix in logical_matrices(shape, route))
