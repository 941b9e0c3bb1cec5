"""Nodes that train by themselves: for ever, or with an average every few steps (DiLoCo)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_muon.optim.flexdemo.between_nodes import BetweenNodes, Surroundings
from lightning_muon.optim.flexdemo.bucket import Bucket
from lightning_muon.optim.flexdemo.exchange import Exchange
from lightning_muon.optim.flexdemo.layout import local_of_nodes, part_of
from lightning_muon.optim.flexdemo.parts import BucketPlan, Shape, plan_buckets, sent_bytes
from lightning_muon.optim.matrix_step import Gradients
from lightning_muon.params.layout import local_tensor
from lightning_muon.replicators.diloco import DiLoCo
from lightning_muon.replicators.full import Full
from lightning_muon.replicators.replicator import Turn

# Of AdamW; where nodes train by themselves each has its own.
_MOMENTS = ("exp_avg", "exp_avg_sq")


class OwnWay(BetweenNodes):
    """Nodes do not follow each other. Saved are the weights of each node, and the moments of AdamW, if it has any."""

    keeps_weights_equal: ClassVar[bool] = False
    own_state: ClassVar[frozenset[str]] = frozenset(_MOMENTS)

    def init_state(self, parameter: Tensor) -> None:
        """As in :class:`BetweenNodes`: a mark, since torch takes an optimizer without state for a new one."""
        self._around.states[parameter].setdefault("num_nodes", torch.tensor(float(self._around.position[1])))

    def updates(self, gradients: Gradients, sent_early: frozenset[str]) -> Gradients:
        """The gradients of this node, or their signs."""
        del sent_early
        updates = {tensor: gradients[tensor] for tensor in self._around.parameters() if tensor in gradients}
        if self._around.config.takes_sign:
            return {tensor: update.sign() for tensor, update in updates.items()}
        return updates

    def saved(self, parameter: Tensor) -> dict[str, Tensor]:
        """As in :class:`BetweenNodes`."""
        state = self._around.states[parameter]
        own = {"node_weights": parameter.detach()} | {key: state[key] for key in _MOMENTS if key in state}
        return {key: self._around.of_all_nodes(parameter, local_tensor(value).clone()) for key, value in own.items()}

    def load(self, parameter: Tensor, saved: Mapping[str, Any]) -> None:
        """As in :class:`BetweenNodes`. With another number of nodes each goes on from the mean of the saved ones."""
        if "node_weights" in saved:
            weights = local_of_nodes(saved["node_weights"], parameter, self._around.layout, rule="mean")
            local_tensor(parameter.detach()).copy_(weights)
        for key in _MOMENTS:
            if key in saved:
                self._around.states[parameter][key] = moment = torch.zeros_like(parameter)
                is_of_nodes = saved[key].ndim > parameter.ndim
                local_tensor(moment).copy_(
                    local_of_nodes(saved[key], parameter, self._around.layout, rule="mean")
                    if is_of_nodes
                    else part_of(saved[key], parameter)
                )

    def sent_bytes(self) -> int:
        """Nothing."""
        return 0


class OuterStep(OwnWay):
    """DiLoCo.

    State of each parameter: ``anchor``, the weights that all nodes have in common; ``outer_momentum``; with ``overlap``
    also ``launched`` (R, *shape), the weights of a node when the mean that is on its way was begun, and ``mean_drift``,
    that mean once it has arrived.

    Args:
        around: The optimizer.
        options: Of the algorithm.
    """

    own_state: ClassVar[frozenset[str]] = frozenset({*_MOMENTS, "anchor", "outer_momentum", "launched", "mean_drift"})

    def __init__(self, around: Surroundings, options: DiLoCo) -> None:
        super().__init__(around)
        self._options = options
        self._on_their_way: list[tuple[Bucket, Exchange]] = []
        self._num_steps = 0

    def init_state(self, parameter: Tensor) -> None:
        """As in :class:`BetweenNodes`."""
        state = self._around.states[parameter]
        if "anchor" in state:
            return
        state["anchor"] = parameter.detach().clone()
        state["outer_momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
        if self._options.overlap:
            local = local_tensor(parameter.detach())
            state["launched"] = self._around.of_all_nodes(parameter, local.float().clone())
            state["mean_drift"] = torch.zeros_like(parameter, dtype=torch.float32)

    def plan(self, names: Mapping[Tensor, str], num_steps: int) -> None:
        """As in :class:`BetweenNodes`; the first step begins with what all nodes have in common."""
        del names
        if num_steps == 0:
            # Frozen ones, too: they may be trained later.
            for parameter in self._around.states:
                self._anchor(parameter).copy_(local_tensor(parameter))

    def finish(self, num_steps: int) -> None:
        """As in :class:`BetweenNodes`: average, if it is time."""
        if num_steps % self._options.period:
            return
        parameters = self._around.parameters()
        if not self._options.overlap:
            self._begin_mean()
            for parameter, drift in self._mean().items():
                self._step_anchor(parameter, drift)
                local_tensor(parameter).copy_(self._anchor(parameter))
            return
        if num_steps > self._options.period:
            self.keep()
            for parameter in parameters:
                state, local = self._around.states[parameter], local_tensor(parameter)
                progress = local - local_tensor(state["launched"])[0]
                self._step_anchor(parameter, local_tensor(state["mean_drift"]))
                local.copy_(self._anchor(parameter) + progress)
        for parameter in parameters:
            local_tensor(self._around.states[parameter]["launched"])[0].copy_(local_tensor(parameter))
        self._begin_mean()

    def keep(self) -> None:
        """As in :class:`BetweenNodes`."""
        for parameter, drift in self._mean().items():
            local_tensor(self._around.states[parameter]["mean_drift"]).copy_(drift)

    def load(self, parameter: Tensor, saved: Mapping[str, Any]) -> None:
        """As in :class:`OwnWay`."""
        super().load(parameter, saved)
        self._on_their_way.clear()
        state = self._around.states[parameter]
        for key in ("anchor", "outer_momentum", "mean_drift"):
            if key in saved:
                state[key] = torch.zeros_like(parameter, dtype=parameter.dtype if key == "anchor" else torch.float32)
                local_tensor(state[key]).copy_(part_of(saved[key], parameter))
        if "launched" in saved:
            local = local_of_nodes(saved["launched"], parameter, self._around.layout, rule="mean")
            state["launched"] = self._around.of_all_nodes(parameter, local)

    @contextmanager
    def common_weights(self) -> Iterator[None]:
        """As in :class:`BetweenNodes`: those of the last average."""
        parameters = self._around.parameters()
        own = [local_tensor(parameter.detach()).clone() for parameter in parameters]
        for parameter in parameters:
            local_tensor(parameter.detach()).copy_(self._anchor(parameter))
        try:
            yield
        finally:
            for parameter, weights in zip(parameters, own, strict=True):
                local_tensor(parameter.detach()).copy_(weights)

    def sent_bytes(self) -> int:
        """As in :class:`BetweenNodes`: those of an average, divided by its period."""
        return round(sum(sent_bytes(plan, *self._around.position) for plan in self._plans()) / self._options.period)

    def _anchor(self, parameter: Tensor) -> Tensor:
        return local_tensor(self._around.states[parameter]["anchor"])

    def _step_anchor(self, parameter: Tensor, drift: Tensor) -> None:
        """One step of SGD with the outer gradient ``drift``."""
        options = self._options
        momentum = local_tensor(self._around.states[parameter]["outer_momentum"])
        momentum.mul_(options.outer_momentum).add_(drift)
        direction = drift + options.outer_momentum * momentum if options.nesterov else momentum
        anchor = self._anchor(parameter)
        anchor.sub_((options.outer_lr * direction).to(anchor.dtype))

    def _plans(self) -> list[BucketPlan]:
        return plan_buckets(
            [Shape(tuple(p.shape), tuple(local_tensor(p).shape)) for p in self._around.parameters()],
            replicator=Full(),
            value_format_name="fp32",
            dense_below=0,
            chunk_bytes=self._around.config.chunk_bytes,
        )

    def _begin_mean(self) -> None:
        """Send ``anchor - weights``, float32."""
        parameters = self._around.parameters()
        drifts = {p: self._anchor(p).float() - local_tensor(p).float() for p in parameters}
        for number, plan in enumerate(self._plans()):
            bucket = Bucket(plan, parameters, drifts)
            bucket.load(drifts)
            sent = bucket.encode(Turn(0, number))
            self._on_their_way.append((bucket, Exchange(plan, sent, self._around.nodes)))

    def _mean(self) -> dict[Tensor, Tensor]:
        """The means that are on their way; waits for them."""
        means: dict[Tensor, Tensor] = {}
        for number, (bucket, exchange) in enumerate(self._on_their_way):
            found = {
                parameter: torch.empty_like(local_tensor(parameter), dtype=torch.float32)
                for parameter in bucket.parameters
            }
            bucket.decode(exchange.result("mean"), Turn(0, number), found, sign=False)
            means |= found
        self._on_their_way.clear()
        return means
