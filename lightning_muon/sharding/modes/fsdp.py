"""``sharding="fsdp"``: parameters, gradients and optimizer state divided with FSDP2, replicated between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.comm.mesh import axis_group, host_group
from lightning_muon.sharding.fsdp import shard_model
from lightning_muon.sharding.gradients import GradientAgreement
from lightning_muon.sharding.modes.mode import ModeOptions, ShardingMode, attach_optimizers
from lightning_muon.sharding.runtime import (
    MicroBatches,
    initialize_roots,
    let_gathers_start,
    set_gradient_divisor,
)
from lightning_muon.sharding.unit_order import UnitOrder


class Fsdp(ShardingMode):
    """FSDP2 over the last axis of the mesh, replicas over the other; parts that the user sharded are left alone."""

    name = "fsdp"
    divides_weights = True
    takes = frozenset({"wrap_policy", "reshard_after_forward", "reshard_after_backward", "early_all_gather"})

    def __init__(self, mesh: DeviceMesh, options: ModeOptions) -> None:
        super().__init__(mesh, options)
        self._divisor: float | None = None
        self._order: UnitOrder | None = None
        self._agreement: GradientAgreement | None = None

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
        )
        initialize_roots(module)

    def watch(self, module: nn.Module) -> None:
        """Note the units that ``module``, as prepared, runs from now on, in trainings and evaluations."""
        if self._order is None:
            self._everyone = axis_group(self.mesh, tuple(range(self.mesh.ndim)))
            self._host = host_group(self._everyone)
            self._order = UnitOrder(module, self.mesh)

    def attach(self, module: nn.Module, optimizers: Sequence[Any]) -> None:
        """As in :class:`ShardingMode`."""
        self._module = module
        self._micro_batches = MicroBatches(module, reshard_after_backward=self.options.reshard_after_backward)
        self.watch(module)
        self._agreement = GradientAgreement(module, self.mesh, self._order)
        attach_optimizers(module, optimizers, layout=None)

    def no_sync(self) -> AbstractContextManager[None]:
        """As in :class:`ShardingMode`."""
        return self._micro_batches.without_sync()

    def set_gradient_divisor(self, divisor: float | None) -> None:
        """As in :class:`ShardingMode`."""
        if divisor != self._divisor:
            set_gradient_divisor(self._module, divisor)
            self._divisor = divisor

    def finish_gradients(self) -> None:
        """As in :class:`ShardingMode`."""
        assert self._agreement is not None, "attach comes first"
        self._micro_batches.finish()
        self._agreement.finish(self._divisor)

    @property
    def unit_order(self) -> UnitOrder | None:
        """As in :class:`ShardingMode`."""
        return self._order

    def finish_evaluation(self) -> None:
        """Compare the units that the ranks have run since the last step or evaluation; after each evaluation.

        Raises:
            RuntimeError: On every rank, if ranks that share weights have run different units.
        """
        if self._order is not None:
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
        if self._order is not None:
            self._order.close()
            self._order = None
