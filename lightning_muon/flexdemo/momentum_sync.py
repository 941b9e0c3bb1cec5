"""Nodes that exchange components of their momenta in every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import Work
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_muon.flexdemo.bucket import MomentumBucket, signs
from lightning_muon.flexdemo.bucket_plan import BucketPlan, plan_buckets, sent_bytes, shapes_of
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.inter_node_sync import InterNodeSync, Trained
from lightning_muon.flexdemo.node_exchange import Exchange, NodeGroups
from lightning_muon.flexdemo.node_state import Rule, local_of_nodes, part_of
from lightning_muon.flexdemo.replicator import Components, ExchangeStep, Replicator, check_replicator
from lightning_muon.optim.backward_prefetch import BackwardPrefetch, filled
from lightning_muon.optim.executor import Executor
from lightning_muon.optim.parameters import Gradients, States
from lightning_muon.params.layout import StepPart, local_tensor
from lightning_muon.schedule.program import (
    DECODE,
    EARLY_EXCHANGE,
    ENCODE,
    EXCHANGE,
    GRADIENTS,
    IN_BACKWARD,
    SENT,
    SETTLE,
    VALID,
    Op,
)
from lightning_muon.schedule.step import AddedOps


@dataclass(frozen=True, eq=False)
class InFlight:
    """A bucket on its way."""

    bucket: MomentumBucket  # Which.
    number: ExchangeStep  # Of the exchange.
    sent: Sequence[Components]  # What this node sends.
    exchange: Exchange | None = None  # Its messages, once they are on their way.
    taking_part: frozenset[Tensor] = frozenset()  # The parameters that are updated by it.

    def result(self, rule: str) -> list[Components]:
        """See :meth:`Exchange.result`."""
        assert self.exchange is not None, "it was not sent"
        return self.exchange.result(rule)

    def without(self, parameters: Set[Tensor]) -> InFlight:
        """Without an update of ``parameters``."""
        return replace(self, taking_part=self.taking_part - parameters)


@dataclass(frozen=True, eq=False)
class _Fingerprint:
    """By what changed gradients are known without computing all over again."""

    # Where each of them is, and how often torch has written to it, as a DTensor and to the local part.
    versions: Sequence[tuple[int, int, int]]
    prints: Tensor  # Numbers that depend on the value and the place of every element.

    @classmethod
    def of(cls, parameters: Sequence[Tensor], gradients: Gradients) -> _Fingerprint:
        versions = [
            (gradients[p].data_ptr(), gradients[p]._version, -1 if p.grad is None else p.grad._version)
            for p in parameters
        ]
        return cls(versions, _fingerprints([gradients[p] for p in parameters]))


def _fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """A number for each tensor, 1-D; on CUDA, where many small products cost more than a copy, one for all."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    return torch.stack([_fingerprint(part) for part in ([torch.cat(flat)] if flat[0].is_cuda else flat)])


def _fingerprint(flat: Tensor) -> Tensor:
    """Dot product of a tensor with numbers drawn at random, some of which repeat; 0-d, float32."""
    flat = flat.float()
    draws = _draws(flat.device)
    whole = flat.numel() // draws.numel()
    rows = flat[: whole * draws.numel()].view(whole, draws.numel()) @ draws
    rest = flat[whole * draws.numel() :]
    # The places of the rows count, too.
    return (rows * torch.arange(1, whole + 1, device=rows.device)).sum() + torch.dot(rest, draws[: rest.numel()])


@cache
def _draws(device: torch.device) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(1 << 16, generator=generator, dtype=torch.float32, device="cpu").to(device)


class BucketExchanges:
    """The exchanges of all buckets of one rank, step by step.

    Args:
        buckets: In the order in which backward finishes them.
        groups: The ranks that hold the same shards.
        config: Options of the optimizer.
        step: Number of the next step, equal on all nodes.
    """

    def __init__(
        self, buckets: Sequence[MomentumBucket], groups: NodeGroups, config: FlexDeMoConfig, *, step: int = 0
    ) -> None:
        self.buckets = {f"n{number}": bucket for number, bucket in enumerate(buckets)}
        self.step = step
        self._groups, self._config = groups, config
        self._numbers = {key: number for number, key in enumerate(self.buckets)}
        self._in_flight: dict[str, InFlight] = {}
        self._seen: dict[str, _Fingerprint] = {}

    def start_early(self, key: str, gradients: Gradients) -> None:
        """Encode a bucket and send it before the step, which will ask :meth:`differs`.

        Collective over the nodes; every rank of them must call it, in the same order of buckets.
        """
        self._seen[key] = _Fingerprint.of(self.buckets[key].parameters, gradients)
        self.encode(key, gradients)
        self.send(key)

    def encode(self, key: str, gradients: Gradients) -> None:
        """Choose what is sent of a bucket; every gradient is there. The residuals stay as they are; local."""
        bucket, number = self.buckets[key], ExchangeStep(self.step, self._numbers[key])
        self._groups.send_sums(self.step)
        bucket.accumulate(gradients, self._config.decay)
        self._in_flight[key] = InFlight(bucket, number, bucket.encode(number))

    def send(self, key: str) -> None:
        """Send what was encoded. Collective over the nodes; every rank must call it, in the same order of buckets."""
        one = self._in_flight[key]
        exchange = Exchange(one.bucket.plan, one.sent, self._groups, due=self.step + self._config.delay)
        self._in_flight[key] = replace(one, exchange=exchange)

    def settle(self, key: str, taking_part: frozenset[Tensor]) -> InFlight:
        """Take from the residuals of these parameters what was sent of the bucket; its exchange. Local."""
        one = self._in_flight.pop(key)
        one.bucket.settle(one.sent, one.number, taking_part)
        self._groups.send_sums(self.step)
        return replace(one, taking_part=taking_part)

    def drop(self, key: str) -> None:
        """Wait for a bucket whose result is not wanted."""
        self._in_flight.pop(key).result(self._config.merge)

    def differs(self, key: str, gradients: Gradients) -> Tensor:
        """Whether :meth:`start_early` would send something else now; a bool on the device."""
        bucket = self.buckets[key]
        before, now = self._seen[key], _Fingerprint.of(bucket.parameters, gradients)
        if before.versions == now.versions:
            # Memory that is written to behind torch's back, by ``grad.data.mul_(2)``, keeps its version.
            return (before.prints != now.prints).any()
        return bucket.is_accumulated(gradients, self._config.decay).logical_not()


class Updates(dict[Tensor, Tensor]):
    """Update of each parameter that takes part in a step, float32; the ops ``decode`` of the step fill it.

    Args:
        expected: Parameters whose updates are on their way.
        config: How they are merged, and whether signs are taken.
        late: Updates of before, which are added.
    """

    def __init__(
        self, expected: Set[Tensor], config: FlexDeMoConfig, late: Mapping[Tensor, Tensor] | None = None
    ) -> None:
        late = late or {}
        super().__init__({tensor: update for tensor, update in late.items() if tensor not in expected})
        self._late = {tensor: update for tensor, update in late.items() if tensor in expected}
        self._config = config
        self._promised = expected | self.keys()

    def __contains__(self, tensor: object) -> bool:
        return tensor in self._promised

    def receive(self, one: InFlight) -> None:
        """Wait for what the nodes have sent of a bucket, and decode it. Collective as :meth:`Exchange.result` is."""
        merged = one.result(self._config.merge)
        updates = one.bucket.decode(merged, one.number, one.taking_part, sign=self._config.takes_sign)
        for tensor, update in updates.items():
            late = self._late.pop(tensor, None)
            self[tensor] = like(local_tensor(tensor), update if late is None else update + late)


def like(local: Tensor, update: Tensor) -> Tensor:
    """``update`` in the dtype and the memory order of ``local``, which some of torch's kernels rely on."""
    if update.stride() == local.stride() and update.dtype == local.dtype:
        return update
    return torch.empty_like(local).copy_(update)


class EarlyExchanges(BackwardPrefetch):
    """Sends each bucket as soon as the gradients of its parameters are there.

    Args:
        exchanges: Of one plan.
        names: Of the parameters.
    """

    def __init__(self, exchanges: BucketExchanges, names: Mapping[Tensor, str]) -> None:
        buckets = {key: bucket.parameters for key, bucket in exchanges.buckets.items()}
        super().__init__(buckets, {key: names[tensors[0]] for key, tensors in buckets.items()})
        self._exchanges = exchanges
        self._gradients: Gradients = {}
        self._executor: Executor | None = None

    def run_on(self, executor: Executor) -> None:
        """Let ``executor`` run the ops of the backward phase, by :meth:`run`."""
        self._executor = executor

    def run(self, op: Op) -> Sequence[Work]:
        """The action of an op ``early_exchange``."""
        self._exchanges.start_early(op.key, self._gradients)
        return ()

    @override
    def _start(self, key: str, gradients: Gradients) -> None:
        assert self._executor is not None, "run_on() comes first"
        self._gradients = gradients
        self._executor.execute_early(_early_exchange(key))
        self._gradients = {}

    @override
    def _wait_until_read(self, key: str) -> None:
        assert self._executor is not None, "run_on() comes first"
        self._executor.wait(_early_exchange(key).name)

    @override
    def _drop(self, key: str) -> None:
        self._wait_until_read(key)
        self._exchanges.drop(key)

    @override
    def _differs(self, key: str, gradients: Gradients) -> Tensor:
        self._wait_until_read(key)
        return self._exchanges.differs(key, gradients)


def _early_exchange(key: str) -> Op:
    return Op(kind=EARLY_EXCHANGE, key=key, rank=0, phase=IN_BACKWARD, when=(SENT,))


def _ops_of_bucket(key: str, *, is_early: bool) -> list[Op]:
    """The ops of a bucket in a step. What was sent during backward, and is valid, is not sent again."""
    unless = (VALID,) if is_early else ()
    encode = Op(kind=ENCODE, key=key, rank=0, when=(GRADIENTS,), unless=unless)
    exchange = Op(kind=EXCHANGE, key=key, rank=0, deps=(encode.name,), when=(GRADIENTS,), unless=unless)
    sent = (exchange.name, _early_exchange(key).name) if is_early else (exchange.name,)
    return [encode, exchange, Op(kind=SETTLE, key=key, rank=0, deps=sent, when=(GRADIENTS,))]


class MomentumSync(InterNodeSync):
    """DeMo and its relatives.

    State of each parameter: ``residual`` (R, *shape), what a node has not sent yet; with ``delay=1`` also
    ``delayed_update``, the update that the next step applies, and whether there is one.
    """

    own_state: ClassVar[frozenset[str]] = frozenset({"residual", "delayed_update", "has_delayed_update"})
    per_node: ClassVar[Mapping[str, Rule]] = {"residual": "sum"}
    marks: ClassVar[frozenset[str]] = frozenset({"residual"})

    def __init__(self, config: FlexDeMoConfig, mesh: DeviceMesh | None) -> None:
        super().__init__(config, mesh)
        assert isinstance(config.replicator, Replicator)
        self._replicator: Replicator = config.replicator
        self._exchanges: BucketExchanges | None = None
        self._early: EarlyExchanges | None = None
        # Of the step that is being taken: local gradients, updates, and what is decoded by bucket.
        self._gradients: Gradients = {}
        self._updates: Updates | None = None
        self._due: dict[str, InFlight] = {}
        # Exchanges of the last step whose updates are still to be applied, by bucket.
        self._delayed: dict[str, InFlight] = {}
        # Whether there may be residuals although there is one node only, and updates of before in the state.
        self._has_loaded = False
        self._has_late = False
        # What the buckets of the plan read and write.
        self._residuals: dict[Tensor, Tensor] = {}
        # Shapes of blocks that the replicator is known to encode.
        self._tried: set[tuple[Replicator, tuple[int, ...]]] = set()

    @property
    @override
    def state_keys(self) -> frozenset[str]:
        return self.own_state if self.config.delay else frozenset({"residual"})

    @override
    def init_state(self, parameter: Tensor, state: dict[str, Any]) -> None:
        """An update that is on its way to a parameter without state is dropped."""
        local = local_tensor(parameter)
        if "residual" not in state:
            zeros = torch.zeros(local.shape, dtype=torch.float32, device=local.device)
            state["residual"] = self.of_all_nodes(parameter, zeros)
            self._delayed = {key: one.without({parameter}) for key, one in self._delayed.items()}
        if self.config.delay and not state.keys() >= self.own_state:
            state["delayed_update"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["has_delayed_update"] = torch.zeros((), dtype=torch.float32, device="cpu")

    @override
    def is_current(self, states: States) -> bool:
        return all(states[parameter].get("residual") is used for parameter, used in self._residuals.items())

    @override
    def check(self, parameters: Sequence[Tensor]) -> None:
        parts = {part for plan in self._plans(parameters) for part in plan.parts if part.block_shape}
        for replicator, block_shape in {(part.replicator, part.block_shape) for part in parts} - self._tried:
            check_replicator(replicator, block_shape)
            self._tried.add((replicator, block_shape))

    @override
    def plan(self, trained: Trained, names: Mapping[Tensor, str], num_steps: int) -> EarlyExchanges | None:
        if self.num_nodes == 1:
            return None
        # Exchanges of the plan before: their updates become a part of the states.
        self.finish_in_flight(trained.states)
        parameters = trained.trainable
        self._residuals = {tensor: trained.states[tensor]["residual"] for tensor in parameters}
        residuals = {tensor: local_tensor(residual)[0] for tensor, residual in self._residuals.items()}
        buckets = [MomentumBucket(plan, parameters, residuals) for plan in self._plans(parameters)]
        self._exchanges = BucketExchanges(buckets, self.groups, self.config, step=num_steps)
        self._early = EarlyExchanges(self._exchanges, names) if self.config.overlap != "step" else None
        return self._early

    @override
    def step_part(self, reads: Mapping[str, Sequence[Tensor]]) -> StepPart:
        if self._exchanges is None:
            return StepPart()
        keys = list(self._exchanges.buckets)
        early = [] if self._early is None else [_early_exchange(key) for key in keys]
        ops = [op for key in keys for op in _ops_of_bucket(key, is_early=self._early is not None)]
        users: dict[Tensor, list[str]] = {}
        for name, tensors in reads.items():
            for tensor in tensors:
                users.setdefault(tensor, []).append(name)
        decode = [
            (Op(kind=DECODE, key=key, rank=0), {name for tensor in bucket.parameters for name in users[tensor]})
            for key, bucket in self._exchanges.buckets.items()
        ]
        return StepPart(
            ops=AddedOps(first=[*early, *ops], needed=decode),
            actions={
                ENCODE: self._encode,
                EXCHANGE: self._exchange,
                SETTLE: self._settle,
                DECODE: self._decode,
                **({} if self._early is None else {EARLY_EXCHANGE: self._early.run}),
            },
            facts=lambda _: {GRADIENTS: {key for key in keys if self._taking_part(key)}},
        )

    @property
    @override
    def order(self) -> list[list[Tensor]]:
        return [bucket.parameters for bucket in self._exchanges.buckets.values()] if self._exchanges else []

    @override
    def updates(self, trained: Trained, gradients: Gradients) -> Gradients:
        if self.num_nodes == 1:
            return self._of_one_node(trained, gradients)
        assert self._exchanges is not None, "plan comes first"
        self._gradients = gradients
        expected = set().union(*(self._taking_part(key) for key in self._exchanges.buckets))
        late = self._take_late(trained)
        if self.config.delay:
            # What has been frozen since is not moved any more.
            self._due = {
                key: one.without({t for t in one.taking_part if not t.requires_grad})
                for key, one in self._delayed.items()
            }
            self._delayed = {}
            expected = {tensor for one in self._due.values() for tensor in one.taking_part}
        self._updates = Updates(expected, self.config, late)
        return self._updates

    def _taking_part(self, key: str) -> frozenset[Tensor]:
        """The parameters of a bucket that have a gradient in this step."""
        assert self._exchanges is not None
        return frozenset(tensor for tensor in self._exchanges.buckets[key].parameters if tensor in self._gradients)

    def _encode(self, op: Op) -> Sequence[Work]:
        assert self._exchanges is not None
        self._exchanges.encode(op.key, filled(self._exchanges.buckets[op.key].parameters, self._gradients))
        return ()

    def _exchange(self, op: Op) -> Sequence[Work]:
        assert self._exchanges is not None
        self._exchanges.send(op.key)
        return ()

    def _settle(self, op: Op) -> Sequence[Work]:
        assert self._exchanges is not None
        target = self._delayed if self.config.delay else self._due
        target[op.key] = self._exchanges.settle(op.key, self._taking_part(op.key))
        return ()

    def _decode(self, op: Op) -> Sequence[Work]:
        assert self._updates is not None
        if op.key in self._due:
            self._updates.receive(self._due.pop(op.key))
        return ()

    @override
    def finish(self, trained: Trained, num_steps: int) -> None:
        self._gradients, self._updates = {}, None
        if self._exchanges is not None:
            self._exchanges.step = num_steps

    @override
    def finish_in_flight(self, states: States) -> None:
        delayed, self._delayed = self._delayed, {}
        updates = Updates(set(), self.config)
        for one in delayed.values():
            updates.receive(one)
        for tensor, update in updates.items():
            state = states[tensor]
            if not state.keys() >= self.own_state:
                continue  # The parameter begins anew.
            local_tensor(state["delayed_update"]).copy_(update)
            state["has_delayed_update"].fill_(1)
            self._has_late = True

    @override
    def load(self, parameter: Tensor, state: dict[str, Any], saved: Mapping[str, Any]) -> None:
        self._delayed, self._has_loaded, self._has_late = {}, True, True
        if "residual" in saved:
            local = local_of_nodes(saved["residual"], parameter, self.layout, rule=self.per_node["residual"])
            state["residual"] = self.of_all_nodes(parameter, local)
        if "delayed_update" in saved:
            state["delayed_update"] = torch.zeros_like(parameter, dtype=torch.float32)
            local_tensor(state["delayed_update"]).copy_(part_of(saved["delayed_update"], parameter))
            state["has_delayed_update"] = torch.tensor(float(saved["has_delayed_update"]), device="cpu")

    @override
    def sent_bytes(self, parameters: Sequence[Tensor]) -> int:
        return sum(sent_bytes(plan, self.node, self.num_nodes) for plan in self._plans(parameters))

    def _plans(self, parameters: Sequence[Tensor]) -> list[BucketPlan]:
        return plan_buckets(
            shapes_of(parameters),
            replicator=self._replicator,
            value_format_name=self.config.value_format,
            dense_below=self.config.dense_below,
            chunk_bytes=self.config.chunk_bytes,
        )

    def _of_one_node(self, trained: Trained, gradients: Gradients) -> Gradients:
        """No other node has a part in the updates: all of the momentum, which is the gradient."""
        updates = {tensor: gradients[tensor] for tensor in trained.trainable if tensor in gradients}
        if self._has_loaded:
            for tensor, gradient in updates.items():
                residual = local_tensor(trained.states[tensor]["residual"])[0]
                updates[tensor] = gradient + (self.config.decay * residual).to(gradient.dtype)
                residual.zero_()
        if self.config.takes_sign:
            updates = {tensor: signs(update) for tensor, update in updates.items()}
        for tensor, late in self._take_late(trained).items():
            updates[tensor] = updates[tensor] + late if tensor in updates else late
        return updates

    def _take_late(self, trained: Trained) -> dict[Tensor, Tensor]:
        """The updates that :meth:`finish_in_flight` has put into the states, or a checkpoint has brought."""
        if not self._has_late:
            return {}
        late: dict[Tensor, Tensor] = {}
        for tensor in trained.parameters:
            state = trained.states[tensor]
            if state.get("has_delayed_update"):
                if tensor.requires_grad:
                    late[tensor] = local_tensor(state["delayed_update"]).to(tensor.dtype, copy=True)
                state["has_delayed_update"].zero_()
        self._has_late = False
        return late
