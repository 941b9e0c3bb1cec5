"""``sharding="zero2"``: whole weights on every rank; gradients and optimizer state divided over the shard axis.

Gradients are reduced during backward to the rank that needs them: a matrix to its owner, who then orthogonalizes it
without any gather, and rows of everything else. New values travel back while the next forward already runs.

Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5 (stage 2); here with whole matrices as parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.comm.agreement import gather
from lightning_muon.comm.mesh import AxisGroup, axis_group, host_group
from lightning_muon.comm.nodes import make_hops, nodes_of
from lightning_muon.grad_sync.buckets import BUCKET_BYTES, num_bytes
from lightning_muon.grad_sync.divided_layout import DividedLayout
from lightning_muon.grad_sync.holdings import Holdings, divide
from lightning_muon.grad_sync.reduce_to_holders import ReduceToHolders
from lightning_muon.grad_sync.reducer import GradientReducer
from lightning_muon.grad_sync.return_parameters import ParameterReturn, units_of
from lightning_muon.math.newton_schulz import newton_schulz_flops
from lightning_muon.params.layout import Layout
from lightning_muon.params.logical import logical_matrices
from lightning_muon.params.routing import Route
from lightning_muon.schedule.between_nodes import Grid, ShardExchange, choose_exchange, node_grid
from lightning_muon.schedule.cost import PRESETS
from lightning_muon.sharding.modes.mode import Attachable, ModeOptions, ShardingMode, attach_optimizers
from lightning_muon.sharding.replicas import names_of, replicate_model
from lightning_muon.sharding.wrap import find_units


@dataclass(frozen=True, eq=False)
class _Running:
    """What a training has beside the mode itself; ``root_parameters`` belong to no unit of the model."""

    reducer: GradientReducer
    returns: ParameterReturn
    layout: DividedLayout
    root_parameters: Sequence[Tensor]


class Zero2(ShardingMode):
    """Divides the last axis of the mesh; replicas, the other axis, sum their parts once more."""

    name = "zero2"
    divides_weights = False
    parameters_arrive_late = True
    takes = frozenset({"bucket_bytes", "wrap_policy"})

    def __init__(self, mesh: DeviceMesh, options: ModeOptions) -> None:
        super().__init__(mesh, options)
        self._running: _Running | None = None

    def prepare(self, module: nn.Module) -> None:
        """As in :class:`ShardingMode`."""
        replicate_model(module, self.mesh, self.name)

    def attach(self, module: nn.Module, optimizers: Sequence[Any]) -> None:
        """As in :class:`ShardingMode`."""
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
        holdings = Holdings(self.mesh, divide(parameters, matrices, self.mesh.size(-1)))
        everyone = axis_group(self.mesh, tuple(range(self.mesh.ndim)))
        exchange, grid = self._choose_exchange(everyone, parameters)
        gradients = ReduceToHolders(holdings, grid)
        reducer = GradientReducer(
            parameters,
            gradients,
            everyone,
            names={parameter: name for name, parameter in named.items()},
            bucket_bytes=exchange.bucket_bytes,
        )
        units = units_of(module, find_units(module, self.options.wrap_policy))
        # A step updates what has no matrices first, the embedding among it, which the next forward needs first.
        buckets = sorted(
            (bucket.parameters for bucket in reducer.buckets), key=lambda b: not matrices.keys().isdisjoint(b)
        )
        returns = ParameterReturn(holdings, buckets, make_hops(holdings.shard, grid), units)
        self._running = _Running(reducer, returns, DividedLayout(holdings, reducer, gradients, returns), units[module])
        attach_optimizers(module, used, self._running.layout)

    def _choose_exchange(self, everyone: AxisGroup, parameters: Sequence[Tensor]) -> tuple[ShardExchange, Grid]:
        """How gradients and values travel, equal on all ranks, and the grid of this rank's replica.

        Collective over ``everyone``; every rank must call it.
        """
        replicas: dict[tuple[int, ...], list[int]] = {}
        for coordinate, node in sorted(zip(everyone.coordinates, nodes_of(everyone), strict=True)):
            replicas.setdefault(coordinate[:-1], []).append(node)
        trained = sum(num_bytes(parameter) for parameter in parameters if parameter.requires_grad)
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
    def layout(self) -> Layout:
        """As in :class:`ShardingMode`."""
        assert self._running is not None, "attach comes first"
        return self._running.layout

    def no_sync(self) -> AbstractContextManager[None]:
        """As in :class:`ShardingMode`."""
        assert self._running is not None, "attach comes first"
        return self._running.reducer.no_sync()

    def set_gradient_divisor(self, divisor: float | None) -> None:
        """As in :class:`ShardingMode`."""
        assert self._running is not None, "attach comes first"
        self._running.reducer.set_divisor(self.mesh.size() if divisor is None else divisor)

    def backward_failed(self) -> None:
        """As in :class:`ShardingMode`."""
        if self._running is not None:
            self._running.reducer.give_up()

    def finish_gradients(self) -> None:
        """As in :class:`ShardingMode`."""
        assert self._running is not None, "attach comes first"
        self._running.layout.finish_gradients()
        self._note_step()

    def begin_forward(self) -> None:
        """As in :class:`ShardingMode`: what belongs to no unit has no forward that waits for it."""
        if self._running is not None:
            self._running.returns.wait(self._running.root_parameters)

    def end_step(self) -> None:
        """As in :class:`ShardingMode`."""
        if self.options.wait_for_parameters:
            self.finish_parameters()

    def finish_parameters(self) -> None:
        """As in :class:`ShardingMode`."""
        if self._running is not None:
            self._running.returns.wait_all()

    def close(self) -> None:
        """As in :class:`ShardingMode`; takes the values that still arrive.

        Raises:
            RuntimeError: If they do not arrive, because other ranks are gone.
        """
        self._end_watch()
        if self._running is not None:
            running, self._running = self._running, None
            running.reducer.close()
            running.returns.close()


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
