"""Nodes that exchange components of their momenta in every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_muon.optim.flexdemo.between_nodes import BetweenNodes, OptimizerView
from lightning_muon.optim.flexdemo.bucket import Bucket, signs
from lightning_muon.optim.flexdemo.layout import Rule, local_of_nodes, part_of
from lightning_muon.optim.flexdemo.parts import BucketPlan, Shape, plan_buckets, sent_bytes
from lightning_muon.optim.flexdemo.replication import EarlyExchanges, InFlight, Replication, Rules, Updates
from lightning_muon.optim.matrix_step import Gradients
from lightning_muon.params.layout import local_tensor
from lightning_muon.replicators.checks import check_blocks
from lightning_muon.replicators.replicator import Replicator


class MomentumExchange(BetweenNodes):
    """DeMo and its relatives.

    State of each parameter: ``residual`` (R, *shape), what a node has not sent yet; with ``delay=1`` also
    ``delayed_update``, the update that the next step applies, and whether there is one.
    """

    own_state: ClassVar[frozenset[str]] = frozenset({"residual", "delayed_update", "has_delayed_update"})
    per_node: ClassVar[Mapping[str, Rule]] = {"residual": "sum"}
    marks: ClassVar[frozenset[str]] = frozenset({"residual"})

    def __init__(self, optimizer: OptimizerView) -> None:
        super().__init__(optimizer)
        self._replication: Replication | None = None
        self._updates: Updates | None = None
        # Exchanges of the last step whose updates are still to be applied.
        self._delayed: Sequence[InFlight] = ()
        # Whether there may be residuals although there is one node only, and updates of before in the state.
        self._has_loaded = False
        self._has_late = False
        # What the buckets of the plan read and write.
        self._residuals: dict[Tensor, Tensor] = {}
        # Shapes of blocks that the replicator is known to encode.
        self._tried: set[tuple[Replicator, tuple[int, ...]]] = set()

    @property
    def state_keys(self) -> frozenset[str]:
        """As in :class:`BetweenNodes`."""
        return self.own_state if self._optimizer.config.delay else frozenset({"residual"})

    def init_state(self, parameter: Tensor) -> None:
        """As in :class:`BetweenNodes`; an update that is on its way to a parameter without state is dropped."""
        state, local = self._optimizer.states[parameter], local_tensor(parameter)
        if "residual" not in state:
            zeros = torch.zeros(local.shape, dtype=torch.float32, device=local.device)
            state["residual"] = self._optimizer.of_all_nodes(parameter, zeros)
            self._delayed = [one.without({parameter}) for one in self._delayed]
        if self._optimizer.config.delay and not state.keys() >= self.own_state:
            state["delayed_update"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["has_delayed_update"] = torch.zeros((), dtype=torch.float32, device="cpu")

    def is_current(self) -> bool:
        """As in :class:`BetweenNodes`."""
        states = self._optimizer.states
        return all(states[parameter].get("residual") is used for parameter, used in self._residuals.items())

    def check(self) -> None:
        """As in :class:`BetweenNodes`: the replicator, with the blocks of these parameters."""
        parts = {part for plan in self._plans(self._optimizer.trainable) for part in plan.parts if part.block_shape}
        for replicator, block_shape in {(part.replicator, part.block_shape) for part in parts} - self._tried:
            check_blocks(replicator, block_shape)
            self._tried.add((replicator, block_shape))

    def plan(self, names: Mapping[Tensor, str], num_steps: int) -> EarlyExchanges | None:
        """As in :class:`BetweenNodes`."""
        optimizer = self._optimizer
        if self._num_nodes == 1:
            return None
        parameters = optimizer.trainable
        self._residuals = {tensor: optimizer.states[tensor]["residual"] for tensor in parameters}
        residuals = {tensor: local_tensor(residual)[0] for tensor, residual in self._residuals.items()}
        buckets = [Bucket(plan, parameters, residuals) for plan in self._plans(parameters)]
        delay = optimizer.config.delay
        self._replication = Replication(buckets, optimizer.nodes, self._rules, self._scales, delay=delay)
        self._replication.step = num_steps
        return EarlyExchanges(self._replication, names) if optimizer.config.overlap != "step" else None

    @property
    def order(self) -> list[list[Tensor]]:
        """The parameters in the order in which their updates arrive, those together that arrive together."""
        return [bucket.parameters for bucket in self._replication.buckets.values()] if self._replication else []

    def updates(self, gradients: Gradients, sent_early: frozenset[str]) -> Gradients:
        """As in :class:`BetweenNodes`."""
        if self._num_nodes == 1:
            return self._of_one_node(gradients)
        assert self._replication is not None, "plan comes first"
        due: Sequence[InFlight] = self._replication.run(gradients, sent_early)
        late = self._take_late()
        if self._optimizer.config.delay:
            # What has been frozen since is not moved any more.
            due, self._delayed = (
                [one.without({t for t in one.taking_part if not t.requires_grad}) for one in self._delayed],
                due,
            )
        self._updates = Updates(due, self._rules, late)
        return self._updates

    def finish(self, num_steps: int) -> None:
        """As in :class:`BetweenNodes`."""
        # What nobody has asked for must not be taken for a later message.
        if self._updates is not None:
            self._updates.receive_all()
            self._updates = None
        if self._replication is not None:
            self._replication.step = num_steps

    def finish_in_flight(self) -> None:
        """As in :class:`BetweenNodes`."""
        delayed, self._delayed = self._delayed, ()
        updates = Updates(delayed, self._rules)
        for tensor in [tensor for one in delayed for tensor in one.bucket.parameters if tensor in one.taking_part]:
            state = self._optimizer.states[tensor]
            if not state.keys() >= self.own_state:
                continue  # The parameter begins anew.
            local_tensor(state["delayed_update"]).copy_(updates[tensor])
            state["has_delayed_update"].fill_(1)
            self._has_late = True

    def load(self, parameter: Tensor, saved: Mapping[str, Any]) -> None:
        """As in :class:`BetweenNodes`."""
        self._delayed, self._has_loaded, self._has_late = (), True, True
        state = self._optimizer.states[parameter]
        if "residual" in saved:
            rule = self.per_node["residual"]
            local = local_of_nodes(saved["residual"], parameter, self._optimizer.layout, rule=rule)
            state["residual"] = self._optimizer.of_all_nodes(parameter, local)
        if "delayed_update" in saved:
            state["delayed_update"] = torch.zeros_like(parameter, dtype=torch.float32)
            local_tensor(state["delayed_update"]).copy_(part_of(saved["delayed_update"], parameter))
            state["has_delayed_update"] = torch.tensor(float(saved["has_delayed_update"]), device="cpu")

    def sent_bytes(self) -> int:
        """As in :class:`BetweenNodes`."""
        node, num_nodes = self._optimizer.node, self._optimizer.num_nodes
        return sum(sent_bytes(plan, node, num_nodes) for plan in self._plans(self._optimizer.trainable))

    @property
    def _num_nodes(self) -> int:
        return self._optimizer.num_nodes

    @property
    def _rules(self) -> Rules:
        config = self._optimizer.config
        return Rules(decay=config.decay, merge=config.merge, sign=config.takes_sign)

    def _scales(self) -> Mapping[Tensor, float]:
        """Factors of the gradients of some parameters."""
        return {} if self._optimizer.config.compat == "none" else self._optimizer.learning_rates()

    def _plans(self, parameters: Sequence[Tensor]) -> list[BucketPlan]:
        config = self._optimizer.config
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
        updates = {tensor: gradients[tensor] for tensor in self._optimizer.trainable if tensor in gradients}
        if self._has_loaded:
            for tensor, gradient in updates.items():
                residual = local_tensor(self._optimizer.states[tensor]["residual"])[0]
                updates[tensor] = gradient + (self._optimizer.config.decay * residual).to(gradient.dtype)
                residual.zero_()
        if self._rules.sign:
            updates = {tensor: signs(update) for tensor, update in updates.items()}
        for tensor, late in self._take_late().items():
            updates[tensor] = updates[tensor] + late if tensor in updates else late
        return updates

    def _take_late(self) -> dict[Tensor, Tensor]:
        """The updates that :meth:`finish_in_flight` has put into the state, or a checkpoint has brought."""
        if not self._has_late:
            return {}
        late: dict[Tensor, Tensor] = {}
        for tensor in self._optimizer.all_parameters():
            state = self._optimizer.states[tensor]
            if state.get("has_delayed_update"):
                if tensor.requires_grad:
                    late[tensor] = local_tensor(state["delayed_update"]).to(tensor.dtype, copy=True)
                state["has_delayed_update"].zero_()
        self._has_late = False
        return late
