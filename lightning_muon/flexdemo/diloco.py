"""DiLoCo: nodes train by themselves, and average their weights every few steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_muon.comm.collectives import make_buckets, start_all_reduce_sum
from lightning_muon.compat.torch import profiled
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.replicators import DiLoCo
from lightning_muon.flexdemo.sync import InterNodeSync, Trained
from lightning_muon.optim.parameters import Gradients
from lightning_muon.params.layout import local_tensor

ParameterState = dict[str, Any]


class DiLoCoSync(InterNodeSync):
    """Averages every few steps how far the nodes have moved their weights (DiLoCo).

    State of each parameter: ``anchor``, the weights of the last average; ``has_moved`` since then; ``outer_momentum``.
    """

    entries: ClassVar[tuple[str, ...]] = ("anchor", "has_moved", "outer_momentum")

    def __init__(self, config: FlexDeMoConfig, mesh: DeviceMesh | None) -> None:
        super().__init__(config, mesh)
        assert isinstance(config.replicator, DiLoCo)
        self._options = config.replicator
        self._trained = Trained((), {})  # What this step trains.
        # Parameters whose anchor is not known to be that of the other nodes.
        self._without_anchor: set[Tensor] = set()

    @override
    def fill_entries(self, parameter: Tensor, state: ParameterState) -> None:
        if not state.keys() >= {*self.entries}:
            state.update({key: self.zeros(key, parameter) for key in self.entries})
            _anchor(state).copy_(local_tensor(parameter.detach()))
            self._without_anchor.add(parameter)

    @override
    def plan(self, trained: Trained) -> None:
        """Set anchors: at the first step to the common weights, for parameters without state later to node 0's."""
        for parameter in trained.parameters:
            state = trained.states[parameter]
            if self.num_steps == 0:
                _anchor(state).copy_(local_tensor(parameter))
            elif parameter in self._without_anchor and self.num_nodes > 1:
                dist.broadcast(_anchor(state), group=self.group.group, group_src=0)
        self._without_anchor.clear()

    @override
    def updates(self, trained: Trained, gradients: Gradients) -> Gradients:
        self._trained = trained
        updates = super().updates(trained, gradients)
        for parameter in updates:
            trained.states[parameter]["has_moved"].fill_(1)
        return updates

    @override
    def common(self, trained: Trained) -> Sequence[Tensor]:
        return [trained.states[parameter].get("anchor", parameter) for parameter in trained.parameters]

    @override
    def finish(self) -> None:
        super().finish()
        if self.num_steps % self._options.period == 0:
            with profiled("exchange", "average"):
                self._average()

    @override
    def load(self, parameter: Tensor, state: ParameterState, saved: Mapping[str, Any]) -> None:
        super().load(parameter, state, saved)
        if "anchor" in saved:
            self._without_anchor.discard(parameter)

    @override
    def sent_bytes(self, parameters: Sequence[Tensor]) -> int:
        num_bytes = 4 * sum(local_tensor(parameter).numel() for parameter in parameters)
        return round(2 * (self.num_nodes - 1) * num_bytes / (self.num_nodes * self._options.period))

    def _average(self) -> None:
        """Let all nodes go on from the next common weights. Collective over the nodes."""
        states = self._trained.states
        moved = [parameter for parameter in self._trained.parameters if states[parameter]["has_moved"]]
        drift = {p: (_anchor(states[p]).float() - local_tensor(p).float()).contiguous() for p in moved}
        self._sum_over_nodes(list(drift.values()))
        for parameter, total in drift.items():
            state = states[parameter]
            self._step_anchor(state, total.div_(self.num_nodes))
            local_tensor(parameter).copy_(_anchor(state))
            state["has_moved"].zero_()

    def _sum_over_nodes(self, tensors: Sequence[Tensor]) -> None:
        """Sum contiguous tensors in place, those of a bucket together. Collective over the nodes."""
        if self.num_nodes == 1:
            return
        buckets = make_buckets(tensors, self.config.bucket_bytes)
        sums = [torch.cat([tensor.view(-1) for tensor in bucket]) for bucket in buckets]
        works = [start_all_reduce_sum(total, self.group) for total in sums if total.numel()]
        for work in works:
            work.wait()
        for bucket, total in zip(buckets, sums, strict=True):
            for tensor, piece in zip(bucket, total.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(piece.view_as(tensor))

    def _step_anchor(self, state: ParameterState, outer_gradient: Tensor) -> None:
        """Take one SGD step of the common weights."""
        options = self._options
        momentum = local_tensor(state["outer_momentum"])
        momentum.mul_(options.outer_momentum).add_(outer_gradient)
        direction = outer_gradient + options.outer_momentum * momentum if options.nesterov else momentum
        anchor = _anchor(state)
        anchor.sub_((options.outer_lr * direction).to(anchor.dtype))


def _anchor(state: Mapping[str, Any]) -> Tensor:
    return local_tensor(state["anchor"])
