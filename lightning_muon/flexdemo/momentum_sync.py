"""DeMo and its relatives: nodes exchange components of their momenta in every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import Work
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_muon.flexdemo.bucket import Exchange, MomentumBucket
from lightning_muon.flexdemo.bucket_plan import BucketPlan, Shape, plan_buckets
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.inter_node_sync import InterNodeSync, Trained
from lightning_muon.flexdemo.replicators import ExchangeStep, check_replicator
from lightning_muon.optim.parameters import Gradients, RoutedParameter, States
from lightning_muon.params.layout import StepPart, local_tensor
from lightning_muon.schedule.program import Condition, Op, OpKind
from lightning_muon.schedule.step import AddedOps


class MomentumSync(InterNodeSync):
    """Sends components of momenta to the other nodes, and applies the mean of those of all nodes (DeMo).

    State of each parameter: ``residual`` (R, *shape), the momentum that a node has not sent yet.
    """

    own_state: ClassVar[tuple[str, ...]] = ("residual",)
    per_node: ClassVar[tuple[str, ...]] = ("residual",)

    def __init__(self, config: FlexDeMoConfig, mesh: DeviceMesh | None) -> None:
        super().__init__(config, mesh)
        # The buckets of the plan, in the order in which backward finishes them, and the residuals that they use.
        self._buckets: dict[str, MomentumBucket] = {}
        self._residuals: dict[Tensor, Tensor] = {}
        # Of the current step: gradients, exchanges by bucket, and updates, which op `decode` fills in.
        self._gradients: Gradients = {}
        self._in_flight: dict[str, Exchange] = {}
        self._updates: dict[Tensor, Any] = {}
        self._has_loaded = False  # Whether a state was loaded, so that even a single node may have residuals.

    @property
    @override
    def state_keys(self) -> frozenset[str]:
        return frozenset(self.own_state)

    @override
    def init_state(self, parameter: Tensor, state: dict[str, Any]) -> None:
        if "residual" not in state:
            state["residual"] = self.zeros("residual", parameter)

    @override
    def is_complete(self, states: States) -> bool:
        """Whether nothing is missing, and the residuals are still those that :meth:`plan` has taken."""
        return super().is_complete(states) and all(
            states[parameter].get("residual") is used for parameter, used in self._residuals.items()
        )

    @override
    def common(self, trained: Trained) -> Sequence[Tensor]:
        return trained.parameters

    @override
    def saved(self, parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Tensor]:
        return {}

    @override
    def complete(self, parameters: Sequence[RoutedParameter], states: States) -> None:
        trained = [parameter.tensor for parameter in parameters if parameter.tensor.requires_grad]
        for plan in self._bucket_plans(trained):
            for part in plan.parts:
                check_replicator(part.replicator, part.block_shape)
        super().complete(parameters, states)

    @override
    def plan(self, trained: Trained) -> None:
        if self.layout is None or self.num_nodes == 1:
            return
        parameters = trained.trainable
        self._residuals = {tensor: trained.states[tensor]["residual"] for tensor in parameters}
        residuals = {tensor: local_tensor(residual)[0] for tensor, residual in self._residuals.items()}
        plans = self._bucket_plans(parameters)
        self._buckets = {f"n{number}": MomentumBucket(plan, parameters, residuals) for number, plan in enumerate(plans)}
        self.layout.arrival_order = [bucket.parameters for bucket in self._buckets.values()]

    @override
    def step_part(self, reads: Mapping[str, Sequence[Tensor]]) -> StepPart:
        first: list[Op] = []
        needed: list[tuple[Op, Sequence[str]]] = []
        for key, bucket in self._buckets.items():
            exchange = Op(kind=OpKind.EXCHANGE, key=key, rank=0, when=(Condition.GRADIENTS,))
            users = [name for name, read in reads.items() if not set(bucket.parameters).isdisjoint(read)]
            first.append(exchange)
            needed.append((replace(exchange, kind=OpKind.DECODE, deps=(exchange.name,)), users))
        return StepPart(
            ops=AddedOps(first=first, needed=needed),
            actions={OpKind.EXCHANGE: self._exchange, OpKind.DECODE: self._decode},
            facts=lambda _: {Condition.GRADIENTS: {key for key in self._buckets if self._taking_part(key)}},
        )

    @override
    def updates(self, trained: Trained, gradients: Gradients) -> Gradients:
        if self.num_nodes == 1:
            return self._of_one_node(trained, gradients)
        self._gradients = gradients
        self._updates = dict.fromkeys(set[Tensor]().union(*map(self._taking_part, self._buckets)))
        return self._updates

    def _taking_part(self, key: str) -> set[Tensor]:
        """The parameters of a bucket that have a gradient in this step."""
        return {tensor for tensor in self._buckets[key].parameters if tensor in self._gradients}

    def _exchange(self, op: Op) -> Sequence[Work]:
        """Send a bucket. Collective over the nodes in the same order of buckets."""
        bucket, number = self._buckets[op.key], ExchangeStep(self.num_steps, list(self._buckets).index(op.key))
        bucket.accumulate(self._gradients, self.config.decay)
        self._in_flight[op.key] = Exchange(bucket, number, self.group, self._taking_part(op.key))
        return ()

    def _decode(self, op: Op) -> Sequence[Work]:
        """Fill in the updates of a bucket."""
        updates = self._in_flight.pop(op.key).updates(self.config.merge, sign=self.config.takes_sign)
        for tensor, update in updates.items():
            local = local_tensor(tensor)
            # Some of torch's kernels rely on the dtype and the memory order of the parameter.
            is_like = update.stride() == local.stride() and update.dtype == local.dtype
            self._updates[tensor] = update if is_like else torch.empty_like(local).copy_(update)
        return ()

    @override
    def finish(self) -> None:
        super().finish()
        self._gradients, self._updates = {}, {}

    @override
    def load(self, parameter: Tensor, state: dict[str, Any], saved: Mapping[str, Any]) -> None:
        self._has_loaded = True
        super().load(parameter, state, saved)

    @override
    def sent_bytes(self, parameters: Sequence[Tensor]) -> int:
        return sum(plan.sent_bytes(self.num_nodes) for plan in self._bucket_plans(parameters))

    def _bucket_plans(self, parameters: Sequence[Tensor]) -> list[BucketPlan]:
        shapes = [Shape(tuple(tensor.shape), tuple(local_tensor(tensor).shape)) for tensor in parameters]
        return plan_buckets(shapes, self.config)

    def _of_one_node(self, trained: Trained, gradients: Gradients) -> Gradients:
        """Updates from the whole momentum: the gradient, plus a residual that a run of several nodes has left."""
        momenta = {tensor: gradients[tensor] for tensor in trained.trainable if tensor in gradients}
        for tensor, gradient in momenta.items() if self._has_loaded else ():
            residual = local_tensor(trained.states[tensor]["residual"])[0]
            momenta[tensor] = gradient + (self.config.decay * residual).to(gradient.dtype)
            residual.zero_()
        return super().updates(trained, momenta)
