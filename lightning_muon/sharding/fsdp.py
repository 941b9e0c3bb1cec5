"""``sharding="fsdp"``: parameters, gradients and optimizer state sharded with FSDP2, and replicated between nodes."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lightning_muon.comm.agreement import maxima_over
from lightning_muon.comm.collectives import AxisGroup, axis_group
from lightning_muon.compat import foreach
from lightning_muon.compat.torch import (
    complete_accumulated,
    drop_unreduced_gradients,
    finish_reducing,
    forward_resharding,
    free_unsharded,
    has_partial_sums,
    has_unfinished_backward,
    is_in_backward,
    reset_fsdp,
    rounds_sums_of_shards,
    set_forward_resharding,
    start_reducing,
    unreduced_gradients,
)
from lightning_muon.math.norms import by_device_and_dtype
from lightning_muon.sharding.base import ModeOptions, ShardingMode, attach_optimizers, mesh_device
from lightning_muon.sharding.fsdp_gradients import PlainGradients, UnusedParameters
from lightning_muon.sharding.guards import CallLog
from lightning_muon.sharding.shard_model import initialize_roots, set_gradient_divisor, shard_model
from lightning_muon.sharding.units import UnitListener, fsdp_modules, fsdp_roots, listen


class Fsdp(ShardingMode):
    """FSDP2 over the last axis of the mesh, replicas over the other; parts that the user sharded are left as they are.

    With ``decoupled_nodes`` the mesh is (replicate, shard), and FSDP2 sees the shard axis of each node only. The mean
    of the nodes' gradients is the gradient that all ranks would have computed together.
    """

    name = "fsdp"
    shards_weights = True
    takes = frozenset(
        {"wrap_policy", "reshard_after_forward", "reshard_after_backward", "accumulate", "decoupled_nodes", "roots"}
    )

    def __init__(self, mesh: DeviceMesh, options: ModeOptions) -> None:
        super().__init__(mesh, options)
        self.listeners: list[UnitListener] = []  # Hear what happens to the units.
        self.call_log: CallLog | None = None  # Of the units that this rank runs; compared in the message of a step.
        # What units divide by: in an accumulated batch the number of ranks (None), which is corrected at its end.
        self._unit_divisor: float | None = None
        self._is_accumulating = False  # Whether shards have sums of micro-batches.
        self._num_nodes = mesh.size() // self.reduced_over.size()
        self._hooks: ExitStack | None = None
        self._roots: list[FSDPModule] = []
        self._unused: UnusedParameters | None = None
        self._plain: PlainGradients | None = None
        self._reducing: list[Any] = []  # Roots of a pipeline whose gradients are being reduced.
        # Units that `no_sync` has changed, with their settings from before.
        self._resharding: list[tuple[FSDPModule, list[Any]]] = []

    @cached_property
    def _everyone(self) -> AxisGroup:
        return axis_group(self.reduced_over, tuple(range(self.reduced_over.ndim)))

    @property
    def _sums_shards(self) -> bool:
        is_pipeline = self.options.roots is not None
        return self.options.accumulate == "sharded" and not is_pipeline and self._everyone.group is not None

    @override
    def prepare(self, module: nn.Module) -> None:
        if self.options.roots is None:
            shard_model(module, self.mesh, self.options)
        for root in self.options.roots or ():
            shard_model(root, self.mesh, replace(self.options, wrap_policy=()))
        initialize_roots(module)
        self._listen(module)

    def _listen(self, module: nn.Module) -> None:
        """Hear of the units from here on, again if the mode was closed; collective over the mesh."""
        if self._hooks is None:
            self._module, self._roots = module, list(fsdp_roots(module))
            self.call_log = CallLog(module, self.reduced_over, is_pipeline=self.options.roots is not None)
            self.listeners.append(self.call_log)
            self._hooks = listen(module, self.listeners)

    @override
    def attach(self, module: nn.Module, optimizers: Sequence[Any]) -> None:
        """Watch gradients of the model, whose weights must be materialized; each unit is gathered once."""
        free_unsharded(module)
        self._plain = PlainGradients(module, self._everyone, mesh_device(self.reduced_over))
        initialize_roots(module)
        self._listen(module)
        self._unused = UnusedParameters(module)
        self.listeners.append(self._unused)
        nodes = self.mesh if self.options.decoupled_nodes else None
        attach_optimizers(module, optimizers, layout=None, nodes=nodes)

    @override
    @contextmanager
    def no_sync(self) -> Generator[None]:
        self.attached(self._unused)
        # Each micro-batch gathers the weights again; or whole weights stay from the first forward to the last backward.
        if not self.options.reshard_after_backward and not self._resharding:
            self._resharding = [(unit, forward_resharding(unit)) for unit in fsdp_modules(self._module)]
            for unit, meshes in self._resharding:
                set_forward_resharding(unit, [None] * len(meshes))
        if self._sums_shards and not self._is_accumulating:
            self._is_accumulating = True
            self._divide_units(None)
        self._set_last_backward(False)
        try:
            yield
        finally:
            for unit in fsdp_modules(self._module):
                complete_accumulated(unit)
            self._set_last_backward(True)

    def _set_last_backward(self, is_last: bool) -> None:
        """Choose, before the forward pass, whether the next backward pass finishes the gradients; local."""
        for unit in fsdp_modules(self._module):
            if self._sums_shards and not rounds_sums_of_shards(unit):
                unit.set_requires_all_reduce(is_last, recurse=False)
            else:
                unit.set_requires_gradient_sync(is_last, recurse=False)
            # Otherwise the end of each micro-batch would wait for reductions and forget the prefetch order.
            unit.set_is_last_backward(is_last)
            if not self.options.reshard_after_backward:
                unit.set_reshard_after_backward(is_last, recurse=False)

    @override
    def reduce_part(self, modules: Sequence[nn.Module], scale: Tensor) -> None:
        unused = self.attached(self._unused)
        for root in [each for module in modules for each in fsdp_roots(module)][::-1]:
            for gradient in unreduced_gradients(root):
                gradient.mul_(scale)
            for unit in fsdp_modules(root):  # type: ignore[arg-type]
                complete_accumulated(unit)
                unused.enters_backward(unit)
            start_reducing(root)
            self._reducing.append(root)
        # A wait in between would hold up the backward of this rank's other stages.
        if len(self._reducing) == len(self._roots):
            self._finish_reducing()
        self.attached(self._plain).multiply(modules, scale)

    def _finish_reducing(self) -> None:
        """Let the current stream wait for the reductions that :meth:`reduce_part` has begun; local."""
        for root in self._reducing:
            finish_reducing(root)
        self._reducing.clear()

    @override
    def set_gradient_divisor(self, divisor: float | None) -> None:
        # The average over nodes supplies the other factor.
        super().set_gradient_divisor(None if divisor is None else divisor / self._num_nodes)
        if not self._is_accumulating:
            self._divide_units(self._divisor)

    def _divide_units(self, divisor: float | None) -> None:
        """Let the units divide so from the next backward pass on; local."""
        if self._unit_divisor != divisor:
            set_gradient_divisor(self._module, divisor)
            self._unit_divisor = divisor

    @override
    def finish_gradients(self) -> None:
        """Average the gradients of plain parameters, and remove gradients that no rank has computed.

        If the ranks ran different units, this raises on all of them.
        """
        unused, plain, calls = self.attached(self._unused), self.attached(self._plain), self.attached(self.call_log)
        self._finish_reducing()
        self.require_no_failure()
        for unit, meshes in self._resharding:
            set_forward_resharding(unit, meshes)
        self._resharding.clear()
        used = unused.used()
        maxima = maxima_over(calls.host, [*used, *calls.end_backward_passes()])
        calls.require_equal(maxima[len(used) :])
        if self._is_accumulating:
            self._finish_accumulating(unused)
        unused.keep(maxima[: len(used)])
        plain.average(self._divisor)

    @torch.no_grad()
    def _finish_accumulating(self, unused: UnusedParameters) -> None:
        """Finish the sums of micro-batches. Collective over the meshes of the units."""
        for root in self._roots:
            # Units that the last micro-batch did not run: FSDP2 adds them up over the replicas from torch 2.13 on.
            if units := [unit for unit in fsdp_modules(root) if has_partial_sums(unit)]:  # type: ignore[arg-type]
                for unit in units:
                    unused.enters_backward(unit)
                start_reducing(root)
                self._reducing.append(root)
        self._finish_reducing()
        factor = 1.0 if self._divisor is None else self._everyone.size / self._divisor
        if factor != 1:
            if unused.has_kept():
                raise ValueError(
                    "the divisor of the gradients has changed while they were accumulated, with gradients of an "
                    "earlier step among them, which are divided already; call zero_grad(set_to_none=True) between steps"
                )
            for gradients in by_device_and_dtype(unused.local_gradients()):
                foreach.mul_(gradients, factor)
        self._is_accumulating = False
        self._divide_units(self._divisor)

    @override
    def close(self) -> None:
        self._plain = None
        if self._unused is not None:
            self._unused.close()
            self._unused = None
        self.listeners.clear()
        self.call_log = None
        if self._hooks is not None:
            self._reset()
            self._hooks.close()
            self._hooks = None

    def _reset(self) -> None:
        """Reshard weights, and drop gradients of a failed pass, so that another run can begin; local."""
        self.has_failed |= not is_in_backward() and any(map(has_unfinished_backward, self._roots))
        with suppress(RuntimeError):  # From broken communication, which the original exception reports.
            for root in self._roots:
                reset_fsdp(root)
            for unit in fsdp_modules(self._module) if self.has_failed else ():
                drop_unreduced_gradients(unit)
