"""``sharding="fsdp"``: parameters, gradients and optimizer state divided with FSDP2, replicated between nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.comm.mesh import axis_group, host_group
from lightning_muon.grad_sync.clipping import clip_norm_
from lightning_muon.sharding.fsdp import node_mesh, shard_model
from lightning_muon.sharding.gradients import GradientAgreement
from lightning_muon.sharding.modes.mode import ModeOptions, ShardingMode, attach_optimizers
from lightning_muon.sharding.recovery import Recovery
from lightning_muon.sharding.runtime import (
    MicroBatches,
    initialize_roots,
    let_gathers_start,
    set_gradient_divisor,
)
from lightning_muon.sharding.unit_order import UnitOrder


class Fsdp(ShardingMode):
    """FSDP2 over the last axis of the mesh, replicas over the other; parts that the user sharded are left alone.

    With ``decoupled_nodes`` the mesh is (replicate, shard), and FSDP2 sees the shard axis of each node only. Initial
    weights still come from the first rank of all. Gradients are those of the node; their meaning is such that the mean
    over the nodes is what all ranks would have computed together. What one node runs is no business of the others.
    """

    name = "fsdp"
    divides_weights = True
    takes = frozenset(
        {"wrap_policy", "reshard_after_forward", "reshard_after_backward", "early_all_gather", "decoupled_nodes"}
    )

    def __init__(self, mesh: DeviceMesh, options: ModeOptions) -> None:
        super().__init__(mesh, options)
        self._divisor: float | None = None
        self._agreement: GradientAgreement | None = None
        self._recovery: Recovery | None = None
        # The ranks whose gradients FSDP2 averages.
        self._reduced_over = node_mesh(mesh) if options.decoupled_nodes else mesh
        self._num_nodes = mesh.size() // self._reduced_over.size()

    def prepare(self, module: nn.Module) -> None:
        """As in :class:`ShardingMode`."""
        options = self.options
        shard_model(
            module,
            self.mesh,
            wrap_policy=options.wrap_policy,
            mp_policy=options.mp_policy,
            reshard_after_forward=options.reshard_after_forward,
            shard_root=options.shard_root,
            decoupled_nodes=options.decoupled_nodes,
        )
        initialize_roots(module)

    def watch(self, module: nn.Module) -> None:
        """Note the units that ``module``, as prepared, runs from now on, in trainings and evaluations."""
        if self._order is None:
            self._everyone = axis_group(self._reduced_over, tuple(range(self._reduced_over.ndim)))
            self._host = host_group(self._everyone)
            self._order = UnitOrder(module, self._reduced_over)
            self._recovery = Recovery(module, self._reduced_over, self._order)

    def attach(self, module: nn.Module, optimizers: Sequence[Any]) -> None:
        """As in :class:`ShardingMode`."""
        self._module = module
        self._micro_batches = MicroBatches(module, reshard_after_backward=self.options.reshard_after_backward)
        self.watch(module)
        self._agreement = GradientAgreement(module, self._reduced_over, self._order)
        assert self._recovery is not None
        self._recovery.gradients_dropped = self._agreement.forget
        attach_optimizers(module, optimizers, layout=None, nodes=self.mesh if self.options.decoupled_nodes else None)

    def no_sync(self) -> AbstractContextManager[None]:
        """As in :class:`ShardingMode`."""
        return self._micro_batches.without_sync()

    def set_gradient_divisor(self, divisor: float | None) -> None:
        """As in :class:`ShardingMode`; of nodes their number goes off, because the mean over them divides as well."""
        if divisor is not None:
            divisor /= self._num_nodes
        if divisor != self._divisor:
            set_gradient_divisor(self._module, divisor)
            self._divisor = divisor

    def backward_failed(self) -> None:
        """As in :class:`ShardingMode`."""
        if self._recovery is not None:
            self._recovery.failed(in_backward=True)

    def forward_failed(self) -> None:
        """As in :class:`ShardingMode`."""
        if self._recovery is not None:
            self._recovery.failed(in_backward=False)

    def finish_gradients(self) -> None:
        """As in :class:`ShardingMode`."""
        assert self._agreement is not None and self._recovery is not None, "attach comes first"
        self._recovery.resume()
        self._micro_batches.finish()
        self._agreement.finish(self._divisor)

    def clip_norm_(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """As in :class:`ShardingMode`; of R decoupled nodes the norm is sqrt((|g_1|^2 + ... + |g_R|^2) / R).

        It bounds the norm of the mean gradient from above, equals it if the nodes have equal gradients, and is the same
        on all nodes, which are scaled alike.
        """
        if self._num_nodes == 1:
            return super().clip_norm_(parameters, max_norm)
        root = math.sqrt(self._num_nodes)
        across = axis_group(self.mesh, (0,))
        return clip_norm_(parameters, max_norm * root, layout=self.layout, pipeline=across) / root

    def finish_evaluation(self) -> None:
        """Compare the units that the ranks have run since the last step or evaluation; after each evaluation.

        Raises:
            RuntimeError: On every rank, if ranks that share weights have run different units.
        """
        if self._order is not None and self._recovery is not None:
            self._recovery.resume()
            self._order.compare(self._everyone, self._host)

    def end_step(self) -> None:
        """As in :class:`ShardingMode`."""
        if self.options.early_all_gather and self.mesh.device_type == "cuda":
            let_gathers_start(self._module)

    def close(self) -> None:
        """As in :class:`ShardingMode`."""
        if self._agreement is not None:
            self._agreement.close()
            self._agreement = None
        if self._recovery is not None:
            self._recovery.close()
            self._recovery = None
        self._end_watch()
