"""DeMo and its relatives: nodes exchange components of their momenta in every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_muon.compat.torch import profiled
from lightning_muon.flexdemo.bucket import Exchange, MomentumBucket
from lightning_muon.flexdemo.bucket_plan import BucketPlan, Shape, plan_buckets
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.inter_node_sync import InterNodeSync, Trained
from lightning_muon.flexdemo.replicators import ExchangeStep, check_replicator
from lightning_muon.optim.parameters import Gradients, States
from lightning_muon.params.layout import RoutedParameter, local_tensor


class MomentumSync(InterNodeSync):
    """Sends components of momenta to the other nodes, and applies the mean of those of all nodes (DeMo).

    State of each parameter: ``residual`` (R, *shape), the momentum that a node has not sent yet.
    """

    own_state: ClassVar[tuple[str, ...]] = ("residual",)
    per_node: ClassVar[tuple[str, ...]] = ("residual",)

    def __init__(self, config: FlexDeMoConfig, mesh: DeviceMesh | None) -> None:
        super().__init__(config, mesh)
        # The buckets of the plan, in the order in which backward finishes them, and the residuals that they use.
        self._buckets: list[MomentumBucket] = []
        self._residuals: dict[Tensor, Tensor] = {}
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
        self._buckets = [MomentumBucket(plan, parameters, residuals) for plan in plans]

    @override
    def updates(self, trained: Trained, gradients: Gradients) -> Gradients:
        if self.num_nodes == 1:
            return self._of_one_node(trained, gradients)
        exchanges: list[Exchange] = []
        for number, bucket in enumerate(self._buckets):
            with profiled("exchange", f"n{number}"):
                if taking_part := {tensor for tensor in bucket.parameters if tensor in gradients}:
                    bucket.accumulate(gradients, self.config.decay)
                    exchanges.append(Exchange(bucket, ExchangeStep(self.num_steps, number), self.group, taking_part))
        updates: dict[Tensor, Tensor] = {}
        for number in range(len(exchanges)):
            with profiled("decode", f"n{number}"):  # The buffers of the exchange go with it.
                found = exchanges.pop(0).updates(self.config.merge, sign=self.config.takes_sign)
                updates |= {tensor: _like(local_tensor(tensor), update) for tensor, update in found.items()}
        return updates

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


def _like(local: Tensor, update: Tensor) -> Tensor:
    """The update in the dtype and the memory order of ``local``, on which some of torch's kernels rely."""
    is_like = update.stride() == local.stride() and update.dtype == local.dtype
    return update if is_like else torch.empty_like(local).copy_(update)
