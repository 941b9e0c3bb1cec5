"""DeMo and its relatives: nodes exchange components of their momenta in every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import Work
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_muon.compat import foreach
from lightning_muon.flexdemo.bucket import Exchange, MomentumBucket
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.inter_node_sync import InterNodeSync, Trained
from lightning_muon.flexdemo.node_state import Rule
from lightning_muon.flexdemo.replicators import ExchangeStep, check_replicator
from lightning_muon.optim.backward_prefetch import BackwardPrefetch, filled
from lightning_muon.optim.executor import Executor
from lightning_muon.optim.parameters import Gradients, RoutedParameter, States
from lightning_muon.params.layout import StepPart, local_tensor
from lightning_muon.schedule.program import IN_BACKWARD, Condition, Op, OpKind
from lightning_muon.schedule.step import AddedOps


class EarlyExchanges(BackwardPrefetch):
    """Sends each bucket as soon as the gradients of its parameters are there."""

    def __init__(self, sync: MomentumSync, names: Mapping[Tensor, str]) -> None:
        super().__init__({key: bucket.parameters for key, bucket in sync.buckets.items()}, names)
        self._sync = sync
        self._gradients: Gradients = {}
        # Versions and fingerprints of sent gradients: unchanged ones are recognized without accumulating again.
        self._seen: dict[str, tuple[list[tuple[int, int, int]], Tensor]] = {}
        self.executor: Executor | None = None  # Runs the ops of the backward phase.

    def run(self, op: Op) -> Sequence[Work]:
        """Run an op ``early_exchange``."""
        tensors = self._buckets[op.key]
        self._seen[op.key] = _versions(tensors, self._gradients), _fingerprints(tensors, self._gradients)
        self._sync.start(op.key, self._gradients)
        return ()

    @override
    def _start(self, key: str, gradients: Gradients) -> None:
        assert self.executor is not None
        self._gradients = gradients
        self.executor.execute_early(_early_exchange(key))
        self._gradients = {}

    @override
    def _wait_until_read(self, key: str) -> None:
        assert self.executor is not None
        self.executor.wait(_early_exchange(key).name)

    @override
    def _drop(self, key: str) -> None:
        self._wait_until_read(key)
        self._sync.drop(key)

    @override
    def _differs(self, key: str, gradients: Gradients) -> Tensor:
        self._wait_until_read(key)
        versions, fingerprints = self._seen[key]
        if versions == _versions(self._buckets[key], gradients):
            # A write that torch does not see, such as ``grad.data.mul_(2)``, keeps the version.
            return (fingerprints != _fingerprints(self._buckets[key], gradients)).any()
        return self._sync.buckets[key].is_accumulated(gradients, self._sync.config.decay).logical_not()


def _versions(parameters: Sequence[Tensor], gradients: Gradients) -> list[tuple[int, int, int]]:
    """Address of each gradient, and torch's version counters of its local part and of the DTensor."""
    return [
        (gradients[p].data_ptr(), gradients[p]._version, -1 if p.grad is None else p.grad._version) for p in parameters
    ]


def _fingerprints(parameters: Sequence[Tensor], gradients: Gradients) -> Tensor:
    """Sum and norm of each gradient, on CUDA of all together; 1-D."""
    flat = [gradients[p].detach().reshape(-1).float() for p in parameters]
    if flat[0].is_cuda:
        flat = [torch.cat(flat)]  # Many small sums cost more than a copy.
    return torch.stack([*foreach.norm(flat, 2), *(tensor.sum() for tensor in flat)])


def _early_exchange(key: str) -> Op:
    return Op(kind=OpKind.EARLY_EXCHANGE, key=key, rank=0, phase=IN_BACKWARD, when=(Condition.SENT,))


class MomentumSync(InterNodeSync):
    """Sends components of momenta to the other nodes, and applies the mean of those of all nodes (DeMo).

    State of each parameter: ``residual`` (R, *shape), the momentum that a node has not sent yet; with ``delay=1`` also
    ``delayed_update``, the update that the next step applies, and ``has_delayed_update``.
    """

    own_state: ClassVar[tuple[str, ...]] = ("residual", "delayed_update", "has_delayed_update")
    per_node: ClassVar[Mapping[str, Rule]] = {"residual": "sum"}

    def __init__(self, config: FlexDeMoConfig, mesh: DeviceMesh | None) -> None:
        super().__init__(config, mesh)
        self.wire = config
        # The buckets of the plan, in the order in which backward finishes them, and the residuals that they use.
        self.buckets: dict[str, MomentumBucket] = {}
        self._residuals: dict[Tensor, Tensor] = {}
        # Gradients of the current step.
        self._gradients: Gradients = {}
        # Update to apply, by parameter. Op `decode` fills in those that are exchanged, and adds the value from before:
        # a late update of an earlier step, or None.
        self._updates: dict[Tensor, Any] = {}
        # Exchanges by bucket: begun; to be applied by this step; and (with delay=1) by the next one.
        self._in_flight: dict[str, Exchange] = {}
        self._due: dict[str, Exchange] = {}
        self._delayed: dict[str, Exchange] = {}
        self._has_loaded = False  # Whether a state was loaded, so that even a single node may have residuals.

    @property
    @override
    def state_keys(self) -> frozenset[str]:
        return frozenset(self.own_state if self.config.delay else self.own_state[:1])

    @override
    def init_state(self, parameter: Tensor, state: dict[str, Any]) -> None:
        """Add missing entries; a pending update of a parameter without a residual is dropped."""
        residual, *of_delay = self.own_state
        if residual not in state:
            state[residual] = self.zeros(residual, parameter)
            for one in self._delayed.values():
                one.taking_part.discard(parameter)
        if not state.keys() >= self.state_keys:
            state.update({key: self.zeros(key, parameter) for key in of_delay})

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
        for plan in self.bucket_plans(trained):
            for part in plan.parts:
                check_replicator(part.replicator, part.block_shape)
        super().complete(parameters, states)

    @override
    def plan(self, trained: Trained, names: Mapping[Tensor, str]) -> None:
        if self.layout is None or self.num_nodes == 1:
            return
        # Exchanges of the last plan: store their updates in the states.
        self.finish_in_flight(trained.states)
        parameters = trained.trainable
        self._residuals = {tensor: trained.states[tensor]["residual"] for tensor in parameters}
        residuals = {tensor: local_tensor(residual)[0] for tensor, residual in self._residuals.items()}
        plans = self.bucket_plans(parameters)
        self.buckets = {f"n{number}": MomentumBucket(plan, parameters, residuals) for number, plan in enumerate(plans)}
        self.layout.arrival_order = [bucket.parameters for bucket in self.buckets.values()]
        self._in_flight = {}
        _ = self.groups  # Made here, where all ranks call it.
        self.early = EarlyExchanges(self, names) if self.config.overlap != "step" else None

    @override
    def step_part(self, reads: Mapping[str, Sequence[Tensor]]) -> StepPart:
        early = {} if self.early is None else {key: _early_exchange(key) for key in self.buckets}
        exchanges: list[Op] = []
        settles: list[Op] = []  # After all exchanges, since they wait for the sums.
        decode: list[tuple[Op, Sequence[str]]] = []
        for key, bucket in self.buckets.items():
            # A bucket that was sent during backward, and is valid, is not sent again.
            unless = (Condition.VALID,) if early else ()
            exchange = Op(kind=OpKind.EXCHANGE, key=key, rank=0, when=(Condition.GRADIENTS,), unless=unless)
            sent = (exchange.name, early[key].name) if early else (exchange.name,)
            exchanges.append(exchange)
            settles.append(Op(kind=OpKind.SETTLE, key=key, rank=0, deps=sent, when=(Condition.GRADIENTS,)))
            users = [name for name, read in reads.items() if not set(bucket.parameters).isdisjoint(read)]
            decode.append((Op(kind=OpKind.DECODE, key=key, rank=0), users))
        actions = {OpKind.EXCHANGE: self._exchange, OpKind.SETTLE: self._subtract_sent, OpKind.DECODE: self._decode}
        if self.early is not None:
            actions[OpKind.EARLY_EXCHANGE] = self.early.run
        return StepPart(
            ops=AddedOps(first=[*early.values(), *exchanges, *settles], needed=decode),
            actions=actions,
            facts=lambda _: {Condition.GRADIENTS: {key for key in self.buckets if self._taking_part(key)}},
        )

    @override
    def updates(self, trained: Trained, gradients: Gradients) -> Gradients:
        if self.num_nodes == 1:
            return self._of_one_node(trained, gradients)
        self._gradients = gradients
        expected: set[Tensor] = set().union(*(self._taking_part(key) for key in self.buckets))
        if self.config.delay:
            self._due, self._delayed = self._delayed, {}
            for one in self._due.values():  # Parameters that were frozen since are not updated.
                one.taking_part = {tensor for tensor in one.taking_part if tensor.requires_grad}
            expected = set().union(*(one.taking_part for one in self._due.values()))
        self._updates = dict.fromkeys(expected) | self._take_late(trained)
        return self._updates

    def _taking_part(self, key: str) -> set[Tensor]:
        """The parameters of a bucket that have a gradient in this step."""
        return {tensor for tensor in self.buckets[key].parameters if tensor in self._gradients}

    def start(self, key: str, gradients: Gradients) -> None:
        """Send a bucket, with all its gradients. Collective over the nodes; every rank must call it in this order."""
        bucket, number = self.buckets[key], ExchangeStep(self.num_steps, list(self.buckets).index(key))
        for one in self._delayed.values():
            one.send_sums()
        bucket.accumulate(gradients, self.config.decay)
        self._in_flight[key] = Exchange(bucket, number, self.groups)

    def drop(self, key: str) -> None:
        """Wait for a bucket whose result is not used."""
        self._in_flight.pop(key).result(self.config.merge)

    def _exchange(self, op: Op) -> Sequence[Work]:
        self.start(op.key, filled(self.buckets[op.key].parameters, self._gradients))
        return ()

    def _subtract_sent(self, op: Op) -> Sequence[Work]:
        """Subtract from the residuals what was sent of a bucket, early or in the step."""
        one = self._in_flight.pop(op.key)
        one.subtract_sent(self._taking_part(op.key))
        if self.config.delay:
            self._delayed[op.key] = one
        else:
            one.send_sums()
            self._due[op.key] = one
        return ()

    def _decode(self, op: Op) -> Sequence[Work]:
        if op.key in self._due:
            for tensor, update in self._received(self._due.pop(op.key)).items():
                local, late = local_tensor(tensor), self._updates[tensor]
                total = update if late is None else update + late
                # Some of torch's kernels rely on the dtype and the memory order of the parameter.
                is_like = total.stride() == local.stride() and total.dtype == local.dtype
                self._updates[tensor] = total if is_like else torch.empty_like(local).copy_(total)
        return ()

    def _received(self, one: Exchange) -> dict[Tensor, Tensor]:
        return one.updates(self.config.merge, sign=self.config.takes_sign)

    @override
    def finish(self) -> None:
        super().finish()
        self._gradients, self._updates = {}, {}

    @override
    def finish_in_flight(self, states: States) -> None:
        delayed, self._delayed = self._delayed, {}
        for one in delayed.values():
            for tensor, update in self._received(one).items():
                if states[tensor].keys() >= self.state_keys:  # Else the state of the parameter was dropped.
                    local_tensor(states[tensor]["delayed_update"]).copy_(update)
                    states[tensor]["has_delayed_update"].fill_(1)

    @override
    def load(self, parameter: Tensor, state: dict[str, Any], saved: Mapping[str, Any]) -> None:
        self._delayed, self._has_loaded = {}, True
        super().load(parameter, state, saved)

    def _of_one_node(self, trained: Trained, gradients: Gradients) -> Gradients:
        """Updates from the whole momentum: the gradient, plus a residual that a run of several nodes has left."""
        momenta = {tensor: gradients[tensor] for tensor in trained.trainable if tensor in gradients}
        for tensor, gradient in momenta.items() if self._has_loaded else ():
            residual = local_tensor(trained.states[tensor]["residual"])[0]
            momenta[tensor] = gradient + (self.config.decay * residual).to(gradient.dtype)
            residual.zero_()
        updates = super().updates(trained, momenta)
        for tensor, late in self._take_late(trained).items():
            updates[tensor] = updates[tensor] + late if tensor in updates else late
        return updates

    def _take_late(self, trained: Trained) -> dict[Tensor, Tensor]:
        """Take the delayed updates from the states, where :meth:`finish_in_flight` or a checkpoint has put them."""
        late: dict[Tensor, Tensor] = {}
        for tensor in trained.parameters:
            state = trained.states[tensor]
            if state.get("has_delayed_update"):
                if tensor.requires_grad:
                    late[tensor] = local_tensor(state["delayed_update"]).to(tensor.dtype, copy=True)
                state["has_delayed_update"].zero_()
        return late
