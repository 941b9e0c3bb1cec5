"""Nodes that exchange components of their momenta in every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_muon.optim.flexdemo.between_nodes import BetweenNodes
from lightning_muon.optim.flexdemo.bucket import Bucket
from lightning_muon.optim.flexdemo.layout import local_of_nodes, part_of
from lightning_muon.optim.flexdemo.parts import BucketPlan, Shape, plan_buckets, sent_bytes
from lightning_muon.optim.flexdemo.replication import EarlyExchanges, InFlight, Replication, Rules, Updates
from lightning_muon.optim.matrix_step import Gradients
from lightning_muon.params.layout import local_tensor
from lightning_muon.replicators.replicator import Replicator


class MomentumExchange(BetweenNodes):
    """DeMo and its relatives.

    State of each parameter: ``residual`` (R, *shape), what a node has not sent yet; with ``delay=1`` also
    ``delayed_update``, the update that the next step applies, and whether there is one.
    """

    own_state: ClassVar[frozenset[str]] = frozenset({"residual", "delayed_update"})

    _replication: Replication | None = None
    # Exchanges of the last step whose updates are still to be applied.
    _delayed: Sequence[InFlight] = ()
    # Whether there may be residuals although there is one node only.
    _has_loaded: bool = False

    def init_state(self, parameter: Tensor) -> None:
        """As in :class:`BetweenNodes`."""
        state, local = self._around.states[parameter], local_tensor(parameter)
        if "residual" in state:
            return
        state["residual"] = self._around.of_all_nodes(parameter, torch.zeros(local.shape, device=local.device))
        if self._around.config.delay:
            state["delayed_update"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["has_delayed_update"] = torch.zeros((), dtype=torch.float32)

    def plan(self, names: Mapping[Tensor, str], num_steps: int) -> EarlyExchanges | None:
        """As in :class:`BetweenNodes`."""
        around = self._around
        if self._num_nodes == 1:
            return None
        parameters = around.parameters()
        residuals = {tensor: local_tensor(around.states[tensor]["residual"])[0] for tensor in parameters}
        buckets = [Bucket(plan, parameters, residuals) for plan in self._plans(parameters)]
        self._replication = Replication(buckets, around.nodes, self._rules, self._scales)
        self._replication.step = num_steps
        return EarlyExchanges(self._replication, names) if around.config.overlap == "backward" else None

    @property
    def order(self) -> list[list[Tensor]]:
        """The parameters in the order in which their updates arrive, those together that arrive together."""
        return [bucket.parameters for bucket in self._replication.buckets.values()] if self._replication else []

    def updates(self, gradients: Gradients, sent_early: frozenset[str]) -> Gradients:
        """As in :class:`BetweenNodes`."""
        if self._num_nodes == 1:
            return self._of_one_node(gradients)
        assert self._replication is not None, "plan comes first"
        begun = self._replication.run(gradients, sent_early)
        if not self._around.config.delay:
            return Updates(begun, self._rules)
        ready = self._take_kept()
        due, self._delayed = self._delayed, begun
        return Updates(due, self._rules, ready)

    def finish(self, num_steps: int) -> None:
        """As in :class:`BetweenNodes`."""
        if self._replication is not None:
            self._replication.step = num_steps

    def keep(self) -> None:
        """As in :class:`BetweenNodes`."""
        delayed, self._delayed = self._delayed, ()
        updates = Updates(delayed, self._rules)
        for tensor in [tensor for one in delayed for tensor in one.bucket.parameters if tensor in one.taking_part]:
            state = self._around.states[tensor]
            local_tensor(state["delayed_update"]).copy_(updates[tensor])
            state["has_delayed_update"].fill_(1)

    def load(self, parameter: Tensor, saved: Mapping[str, Any]) -> None:
        """As in :class:`BetweenNodes`. Of another number of nodes the sum of the residuals is kept."""
        around = self._around
        self._delayed, self._has_loaded = (), True
        state = around.states[parameter]
        if "residual" in saved:
            local = local_of_nodes(saved["residual"], parameter, around.layout, rule="sum")
            state["residual"] = around.of_all_nodes(parameter, local)
        if "delayed_update" in saved:
            state["delayed_update"] = torch.zeros_like(parameter, dtype=torch.float32)
            local_tensor(state["delayed_update"]).copy_(part_of(saved["delayed_update"], parameter))

    def sent_bytes(self) -> int:
        """As in :class:`BetweenNodes`."""
        return sum(sent_bytes(plan, *self._around.position) for plan in self._plans(self._around.parameters()))

    @property
    def _num_nodes(self) -> int:
        return self._around.position[1]

    @property
    def _rules(self) -> Rules:
        config = self._around.config
        return Rules(decay=config.decay, merge=config.merge, sign=config.takes_sign)

    def _scales(self) -> Mapping[Tensor, float]:
        """Factors of the gradients of some parameters."""
        return {} if self._around.config.compat == "none" else self._around.learning_rates()

    def _plans(self, parameters: Sequence[Tensor]) -> list[BucketPlan]:
        config = self._around.config
        replicator = config.effective_replicator
        assert isinstance(replicator, Replicator)
        return plan_buckets(
            [Shape(tuple(tensor.shape), tuple(local_tensor(tensor).shape)) for tensor in parameters],
            replicator=replicator,
            value_format_name=config.value_format,
            dense_below=config.dense_below,
            chunk_bytes=config.chunk_bytes,
        )

    def _of_one_node(self, gradients: Gradients) -> Gradients:
        """No other node has a part in the updates: all of the momentum, which is the gradient."""
        updates = {tensor: gradients[tensor] for tensor in self._around.parameters() if tensor in gradients}
        if self._has_loaded:
            for tensor, gradient in updates.items():
                residual = local_tensor(self._around.states[tensor]["residual"])[0]
                updates[tensor] = gradient + (self._around.config.decay * residual).to(gradient.dtype)
                residual.zero_()
        if self._rules.sign:
            updates = {tensor: update.sign() for tensor, update in updates.items()}
        if self._has_loaded and self._around.config.delay:
            # Saved when there were more nodes.
            kept = self._take_kept()
            updates |= {tensor: updates[tensor] + late if tensor in updates else late for tensor, late in kept.items()}
        return updates

    def _take_kept(self) -> dict[Tensor, Tensor]:
        """What :meth:`keep` has put into the state."""
        kept: dict[Tensor, Tensor] = {}
        for tensor in self._around.parameters():
            state = self._around.states[tensor]
            if state["has_delayed_update"]:
                kept[tensor] = local_tensor(state["delayed_update"]).to(tensor.dtype, copy=True)
                state["has_delayed_update"].zero_()
        return kept
