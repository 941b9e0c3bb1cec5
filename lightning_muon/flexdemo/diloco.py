"""DiLoCo: nodes train by themselves, and average their weights every few steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_muon.comm.groups import axis_group
from lightning_muon.flexdemo.bucket import Exchange, MomentumBucket
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.inter_node_sync import MOMENTS, InterNodeSync, Trained
from lightning_muon.flexdemo.node_state import Rule
from lightning_muon.flexdemo.replicators import DiLoCo, ExchangeStep, Full
from lightning_muon.optim.parameters import Gradients, States
from lightning_muon.params.layout import StepPart, local_tensor
from lightning_muon.schedule.program import Condition, Op, OpKind
from lightning_muon.schedule.step import AddedOps

ParameterState = dict[str, Any]
# Keys of the state of a parameter.
_OF_AVERAGE = ("anchor", "has_moved", "outer_momentum")
_OF_OVERLAP = ("launched", "mean_drift", "is_launched")


class DiLoCoSync(InterNodeSync):
    """Averages every few steps how far the nodes have moved their weights (DiLoCo).

    State of each parameter: ``anchor``, the weights of the last average; ``has_moved`` since then; ``outer_momentum``.
    With ``overlap`` also ``launched`` (R, *shape), the weights of a node when the last average was begun;
    ``mean_drift``, the outer gradient that it gives; ``is_launched``, whether that is still to be applied.
    """

    own_state: ClassVar[tuple[str, ...]] = (*MOMENTS, *_OF_AVERAGE, *_OF_OVERLAP)
    per_node: ClassVar[Mapping[str, Rule]] = {**InterNodeSync.per_node, "launched": "mean"}

    def __init__(self, config: FlexDeMoConfig, mesh: DeviceMesh | None) -> None:
        super().__init__(config, mesh)
        assert isinstance(config.replicator, DiLoCo)
        self._options, self.period = config.replicator, config.replicator.period
        self.wire = FlexDeMoConfig(
            replicator=Full(), value_format="fp32", dense_below=0, chunk_bytes=config.chunk_bytes
        )
        self._in_flight: list[Exchange] = []
        self._trained = Trained((), {})  # What this step trains.
        # Parameters whose anchor is not known to be that of the other nodes.
        self._without_anchor: set[Tensor] = set()

    @property
    @override
    def state_keys(self) -> frozenset[str]:
        return frozenset(_OF_AVERAGE + _OF_OVERLAP if self._options.overlap else _OF_AVERAGE)

    @override
    def init_state(self, parameter: Tensor, state: ParameterState) -> None:
        local = local_tensor(parameter.detach())
        if not state.keys() >= set(_OF_AVERAGE):
            state.update({key: self.zeros(key, parameter) for key in _OF_AVERAGE})
            _anchor(state).copy_(local)
            self._without_anchor.add(parameter)
        if not state.keys() >= self.state_keys:
            state.update({key: self.zeros(key, parameter) for key in _OF_OVERLAP})
            _launched(state).copy_(local)

    @override
    def plan(self, trained: Trained, names: Mapping[Tensor, str]) -> None:
        """Set anchors: at the first step to the common weights, for parameters without state later to node 0's."""
        for parameter in trained.parameters:
            state = trained.states[parameter]
            if self.num_steps == 0:
                _anchor(state).copy_(local_tensor(parameter))
                if self._options.overlap:
                    _launched(state).copy_(local_tensor(parameter))
            elif parameter in self._without_anchor and self.mesh is not None and self.num_nodes > 1:
                dist.broadcast(_anchor(state), group=axis_group(self.mesh, (0,)).group, group_src=0)
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
    def step_part(self, reads: Mapping[str, Sequence[Tensor]]) -> StepPart:
        average = Op(kind=OpKind.EXCHANGE, key="average", rank=0, when=(Condition.GRADIENTS,))
        half_period = (self.period + 1) // 2
        return StepPart(
            ops=AddedOps(last=[average]),
            actions={OpKind.EXCHANGE: self._exchange},
            facts=lambda _: {Condition.GRADIENTS: [average.key] if self._since in (0, half_period) else []},
        )

    @property
    def _since(self) -> int:
        """Number of steps since the last average, including the current one; 0 if an average ends the current one."""
        return (self.num_steps + 1) % self.period

    def _exchange(self, op: Op) -> Sequence[Work]:
        """Begin an average, and apply it; with ``overlap`` apply the one before instead."""
        if self._since:
            # Send sums after half a period, so that they have the other half to arrive; waits for their summands.
            for exchange in self._in_flight:
                exchange.send_sums()
            return ()
        states, parameters = self._trained.states, self._trained.parameters
        moved = [parameter for parameter in parameters if states[parameter]["has_moved"]]
        for parameter in moved:
            states[parameter]["has_moved"].zero_()
        if not self._options.overlap:
            self._begin_mean(moved, states)
            for parameter, outer_gradient in self._mean().items():
                self._step_anchor(states[parameter], outer_gradient)
                local_tensor(parameter).copy_(_anchor(states[parameter]))
            return ()
        self.finish_in_flight(states)
        for parameter in parameters:
            state, local = states[parameter], local_tensor(parameter)
            if state["is_launched"]:
                # Continue from the mean that was begun a period ago, plus the progress of this node since.
                progress = local - _launched(state)
                self._step_anchor(state, local_tensor(state["mean_drift"]))
                local.copy_(_anchor(state) + progress)
                state["is_launched"].zero_()
            _launched(state).copy_(local)
        for parameter in moved:
            states[parameter]["is_launched"].fill_(1)
        self._begin_mean(moved, states)
        return ()

    @override
    def finish_in_flight(self, states: States) -> None:
        for parameter, outer_gradient in self._mean().items():
            local_tensor(states[parameter]["mean_drift"]).copy_(outer_gradient)

    @override
    def load(self, parameter: Tensor, state: ParameterState, saved: Mapping[str, Any]) -> None:
        super().load(parameter, state, saved)
        self._in_flight.clear()
        if "anchor" in saved:
            self._without_anchor.discard(parameter)

    def _step_anchor(self, state: ParameterState, outer_gradient: Tensor) -> None:
        """Take one SGD step of the common weights."""
        options = self._options
        momentum = local_tensor(state["outer_momentum"])
        momentum.mul_(options.outer_momentum).add_(outer_gradient)
        direction = outer_gradient + options.outer_momentum * momentum if options.nesterov else momentum
        anchor = _anchor(state)
        anchor.sub_((options.outer_lr * direction).to(anchor.dtype))

    def _begin_mean(self, parameters: Sequence[Tensor], states: States) -> None:
        """Begin to average ``anchor - weights``, float32."""
        moved = {p: (_anchor(states[p]).float() - local_tensor(p).float()).contiguous() for p in parameters}
        for number, plan in enumerate(self.bucket_plans(parameters)):
            bucket = MomentumBucket(plan, parameters, moved)
            bucket.load()
            self._in_flight.append(Exchange(bucket, ExchangeStep(0, number), self.groups))

    def _mean(self) -> dict[Tensor, Tensor]:
        """Wait for the means that were begun, and return them."""
        means: dict[Tensor, Tensor] = {}
        for exchange in self._in_flight:
            exchange.send_sums()
        for exchange in self._in_flight:
            means |= exchange.updates("mean", sign=False)
        self._in_flight.clear()
        return means


def _anchor(state: Mapping[str, Any]) -> Tensor:
    return local_tensor(state["anchor"])


def _launched(state: Mapping[str, Any]) -> Tensor:
    return local_tensor(state["launched"])[0]
