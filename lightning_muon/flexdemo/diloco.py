"""Nodes that train by themselves: for ever, or with an average every few steps (DiLoCo)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_muon.comm.groups import axis_group
from lightning_muon.flexdemo.bucket import Bucket, signs
from lightning_muon.flexdemo.bucket_plan import BucketPlan, Shape, plan_buckets, sent_bytes
from lightning_muon.flexdemo.inter_node_sync import BetweenNodes, OptimizerView
from lightning_muon.flexdemo.node_exchange import Exchange
from lightning_muon.flexdemo.node_state import Rule, local_of_nodes, part_of
from lightning_muon.flexdemo.replicator import Turn
from lightning_muon.flexdemo.replicators import DiLoCo, Full
from lightning_muon.optim.matrix_step import Gradients
from lightning_muon.params.layout import local_tensor

# Of AdamW and Muon; where nodes train by themselves each has its own.
_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
# Of DiLoCo.
_OF_AVERAGE = frozenset({"anchor", "has_moved", "outer_momentum"})
_OF_OVERLAP = frozenset({"launched", "mean_drift", "is_launched"})


class IndependentNodes(BetweenNodes):
    """Nodes do not follow each other. Saved are the weights and the moments of each node."""

    own_state: ClassVar[frozenset[str]] = frozenset(_MOMENTS)
    per_node: ClassVar[Mapping[str, Rule]] = {"node_weights": "mean"} | dict.fromkeys(_MOMENTS, "mean")
    marks: ClassVar[frozenset[str]] = frozenset({"node_weights"})

    @property
    def state_keys(self) -> frozenset[str]:
        """As in :class:`BetweenNodes`."""
        return frozenset({"placeholder"})

    def init_state(self, parameter: Tensor) -> None:
        """As in :class:`BetweenNodes`: something, since torch takes an optimizer without state for a new one."""
        self._optimizer.states[parameter].setdefault("placeholder", torch.zeros((), device="cpu"))

    def common(self, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """As in :class:`BetweenNodes`: nothing."""
        del parameters
        return ()

    def updates(self, gradients: Gradients, sent_early: frozenset[str]) -> Gradients:
        """The gradients of this node, or their signs."""
        del sent_early
        updates = {tensor: gradients[tensor] for tensor in self._optimizer.trainable if tensor in gradients}
        if self._optimizer.config.takes_sign:
            return {tensor: signs(update) for tensor, update in updates.items()}
        return updates

    def saved(self, parameter: Tensor) -> dict[str, Tensor]:
        """As in :class:`BetweenNodes`."""
        state = self._optimizer.states[parameter]
        own = {"node_weights": parameter.detach()} | {key: state[key] for key in _MOMENTS if key in state}
        return {key: self._optimizer.of_all_nodes(parameter, local_tensor(value).clone()) for key, value in own.items()}

    def load(self, parameter: Tensor, saved: Mapping[str, Any]) -> None:
        """As in :class:`BetweenNodes`. With another number of nodes each goes on from the mean of the saved ones."""
        if "node_weights" in saved:
            weights = local_of_nodes(saved["node_weights"], parameter, self._optimizer.layout, rule="mean")
            local_tensor(parameter.detach()).copy_(weights)
        for key in _MOMENTS:
            if key in saved:
                self._optimizer.states[parameter][key] = moment = torch.zeros_like(parameter)
                is_of_nodes = saved[key].ndim > parameter.ndim
                local_tensor(moment).copy_(
                    local_of_nodes(saved[key], parameter, self._optimizer.layout, rule="mean")
                    if is_of_nodes
                    else part_of(saved[key], parameter)
                )

    def sent_bytes(self) -> int:
        """Nothing."""
        return 0


class OuterStep(IndependentNodes):
    """DiLoCo.

    State of each parameter: ``anchor``, the weights that all nodes have in common; ``has_moved``, whether it was
    trained since the last average; ``outer_momentum``. With ``overlap`` also ``launched`` (R, *shape), the weights of a
    node when the last average was begun; ``mean_drift``, what that average has brought; ``is_launched``, whether it is
    still to be applied.

    Args:
        optimizer: Whose parameters are averaged.
        options: Of the algorithm.
    """

    own_state: ClassVar[frozenset[str]] = frozenset({*_MOMENTS, "anchor", "outer_momentum", "launched", "mean_drift"})
    per_node: ClassVar[Mapping[str, Rule]] = {**IndependentNodes.per_node, "launched": "mean"}
    marks: ClassVar[frozenset[str]] = frozenset({"node_weights", "anchor"})

    def __init__(self, optimizer: OptimizerView, options: DiLoCo) -> None:
        super().__init__(optimizer)
        self._options = options
        self._in_flight: list[tuple[Bucket, Exchange]] = []
        # Parameters whose anchor is not known to be that of the other nodes.
        self._without_anchor: set[Tensor] = set()
        # Weights of this node while its parameters show the common ones.
        self._own: dict[Tensor, Tensor] = {}

    @property
    def state_keys(self) -> frozenset[str]:
        """As in :class:`BetweenNodes`."""
        return _OF_AVERAGE | (_OF_OVERLAP if self._options.overlap else frozenset())

    def init_state(self, parameter: Tensor) -> None:
        """As in :class:`BetweenNodes`."""
        state, local = self._optimizer.states[parameter], local_tensor(parameter.detach())
        if not state.keys() >= _OF_AVERAGE:
            state["anchor"] = parameter.detach().clone()
            state["has_moved"] = torch.zeros((), device="cpu")
            state["outer_momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
            self._without_anchor.add(parameter)
        if self._options.overlap and not state.keys() >= _OF_OVERLAP:
            weights = local.to(torch.float32, copy=True).contiguous()
            state["launched"] = self._optimizer.of_all_nodes(parameter, weights)
            state["mean_drift"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["is_launched"] = torch.zeros((), device="cpu")

    def plan(self, names: Mapping[Tensor, str], num_steps: int) -> None:
        """As in :class:`BetweenNodes`; the first step begins with what all nodes have in common.

        A later one, where the state is gone, begins with the weights of the first node: the next average counts from
        there what each node has learnt.
        """
        del names
        mesh = self._optimizer.mesh
        for parameter in self._optimizer.all_parameters():
            if num_steps == 0:
                self._anchor(parameter).copy_(local_tensor(parameter))
                if self._options.overlap:
                    self._launched(parameter).copy_(local_tensor(parameter))
            elif parameter in self._without_anchor and mesh is not None and mesh.size(0) > 1:
                dist.broadcast(self._anchor(parameter), group=axis_group(mesh, (0,)).group, group_src=0)
        self._without_anchor.clear()

    def updates(self, gradients: Gradients, sent_early: frozenset[str]) -> Gradients:
        """As in :class:`IndependentNodes`."""
        updates = super().updates(gradients, sent_early)
        for parameter in updates:
            self._optimizer.states[parameter]["has_moved"].fill_(1)
        return updates

    def common(self, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """As in :class:`BetweenNodes`: the weights of the last average."""
        return [self._optimizer.states[parameter]["anchor"] for parameter in parameters]

    def finish(self, num_steps: int) -> None:
        """As in :class:`BetweenNodes`: average, if it is time."""
        since = num_steps % self._options.period
        if since:
            if since == (self._options.period + 1) // 2:
                self._send_sums()
            return
        states, parameters = self._optimizer.states, self._optimizer.all_parameters()
        moved = [parameter for parameter in parameters if states[parameter]["has_moved"]]
        for parameter in moved:
            states[parameter]["has_moved"].zero_()
        if not self._options.overlap:
            self._begin_mean(moved)
            for parameter, drift in self._mean().items():
                self._step_anchor(parameter, drift)
                local_tensor(parameter).copy_(self._anchor(parameter))
            return
        self.finish_in_flight()
        for parameter in parameters:
            self._apply_mean(parameter)
            self._launched(parameter).copy_(local_tensor(parameter))
        for parameter in moved:
            states[parameter]["is_launched"].fill_(1)
        self._begin_mean(moved)

    def _send_sums(self) -> None:
        """Half a period for the way there, and half of one for the way back; waits for what sums are made of."""
        for _, exchange in self._in_flight:
            self._optimizer.nodes.send_until(exchange)

    def _apply_mean(self, parameter: Tensor) -> None:
        """Go on from the mean that was begun a period ago, with what this node has learnt since."""
        state, local = self._optimizer.states[parameter], local_tensor(parameter)
        if state["is_launched"]:
            progress = local - self._launched(parameter)
            self._step_anchor(parameter, local_tensor(state["mean_drift"]))
            local.copy_(self._anchor(parameter) + progress)
            state["is_launched"].zero_()

    def finish_in_flight(self) -> None:
        """As in :class:`BetweenNodes`."""
        for parameter, drift in self._mean().items():
            local_tensor(self._optimizer.states[parameter]["mean_drift"]).copy_(drift)

    def load(self, parameter: Tensor, saved: Mapping[str, Any]) -> None:
        """As in :class:`IndependentNodes`."""
        super().load(parameter, saved)
        self._in_flight.clear()
        state = self._optimizer.states[parameter]
        for key in ("anchor", "outer_momentum", "mean_drift"):
            if key in saved:
                self._without_anchor.discard(parameter)
                state[key] = torch.zeros_like(parameter, dtype=parameter.dtype if key == "anchor" else torch.float32)
                local_tensor(state[key]).copy_(part_of(saved[key], parameter))
        if "launched" in saved:
            rule = self.per_node["launched"]
            local = local_of_nodes(saved["launched"], parameter, self._optimizer.layout, rule=rule)
            state["launched"] = self._optimizer.of_all_nodes(parameter, local)

    @contextmanager
    def common_weights(self) -> Iterator[None]:
        """As in :class:`BetweenNodes`: those of the last average."""
        if self._own:  # They are there already.
            yield
            return
        parameters = [p for p in self._optimizer.all_parameters() if "anchor" in self._optimizer.states[p]]
        self._own = {parameter: local_tensor(parameter.detach()).clone() for parameter in parameters}
        for parameter in parameters:
            local_tensor(parameter.detach()).copy_(self._anchor(parameter))
        try:
            yield
        finally:
            for parameter, weights in self._own.items():
                local_tensor(parameter.detach()).copy_(weights)
            self._own = {}

    def saved(self, parameter: Tensor) -> dict[str, Tensor]:
        """As in :class:`BetweenNodes`; weights of this node also inside of :meth:`common_weights`."""
        saved = super().saved(parameter)
        if parameter in self._own:
            saved["node_weights"] = self._optimizer.of_all_nodes(parameter, self._own[parameter].clone())
        return saved

    def sent_bytes(self) -> int:
        """As in :class:`BetweenNodes`: those of an average, divided by its period."""
        node, num_nodes = self._optimizer.node, self._optimizer.num_nodes
        plans = self._plans(self._optimizer.trainable)
        return round(sum(sent_bytes(plan, node, num_nodes) for plan in plans) / self._options.period)

    def _anchor(self, parameter: Tensor) -> Tensor:
        return local_tensor(self._optimizer.states[parameter]["anchor"])

    def _launched(self, parameter: Tensor) -> Tensor:
        return local_tensor(self._optimizer.states[parameter]["launched"])[0]

    def _step_anchor(self, parameter: Tensor, drift: Tensor) -> None:
        """One step of SGD with the outer gradient ``drift``."""
        options = self._options
        momentum = local_tensor(self._optimizer.states[parameter]["outer_momentum"])
        momentum.mul_(options.outer_momentum).add_(drift)
        direction = drift + options.outer_momentum * momentum if options.nesterov else momentum
        anchor = self._anchor(parameter)
        anchor.sub_((options.outer_lr * direction).to(anchor.dtype))

    def _plans(self, parameters: Sequence[Tensor]) -> list[BucketPlan]:
        return plan_buckets(
            [Shape(tuple(parameter.shape), tuple(local_tensor(parameter).shape)) for parameter in parameters],
            replicator=Full(),
            value_format_name="fp32",
            dense_below=0,
            chunk_bytes=self._optimizer.config.chunk_bytes,
        )

    def _begin_mean(self, parameters: Sequence[Tensor]) -> None:
        """Send ``anchor - weights``, float32."""
        drifts = {p: self._anchor(p).float() - local_tensor(p).float() for p in parameters}
        drifts = {p: drift.contiguous() for p, drift in drifts.items()}
        for number, plan in enumerate(self._plans(parameters)):
            bucket = Bucket(plan, parameters, drifts)
            bucket.load(drifts)
            sent = bucket.encode(Turn(0, number))
            self._in_flight.append((bucket, Exchange(plan, sent, self._optimizer.nodes)))

    def _mean(self) -> dict[Tensor, Tensor]:
        """The means that are on their way; waits for them."""
        means: dict[Tensor, Tensor] = {}
        for number, (bucket, exchange) in enumerate(self._in_flight):
            found = {
                parameter: torch.empty(local.shape, dtype=torch.float32, device=local.device)
                for parameter, local in ((parameter, local_tensor(parameter)) for parameter in bucket.parameters)
            }
            bucket.decode(exchange.result("mean"), Turn(0, number), found, sign=False)
            means |= found
        self._in_flight.clear()
        return means
