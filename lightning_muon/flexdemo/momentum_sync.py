"""Nodes that exchange components of their momenta in every step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_muon.comm.reduce_scatter import SideStream
from lightning_muon.flexdemo.bucket import MomentumBucket, signs
from lightning_muon.flexdemo.bucket_plan import BucketPlan, plan_buckets, sent_bytes, shapes_of
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.inter_node_sync import InterNodeSync, Trained
from lightning_muon.flexdemo.node_exchange import Exchange, NodeGroups
from lightning_muon.flexdemo.node_state import Rule, local_of_nodes, part_of
from lightning_muon.flexdemo.replicator import Components, ExchangeStep, Replicator, check_replicator
from lightning_muon.optim.backward_prefetch import BackwardPrefetch, filled
from lightning_muon.optim.parameters import Gradients, States
from lightning_muon.params.layout import local_tensor


@dataclass(frozen=True, eq=False)
class InFlight:
    """A bucket on its way.

    Attributes:
        bucket: Which.
        exchange: Its messages.
        sent: What this node sends.
        number: Of the exchange.
        taking_part: The parameters that are updated by it.
    """

    bucket: MomentumBucket
    exchange: Exchange
    sent: Sequence[Components]
    number: ExchangeStep
    taking_part: frozenset[Tensor] = frozenset()

    def without(self, parameters: Set[Tensor]) -> InFlight:
        """Without an update of ``parameters``."""
        return replace(self, taking_part=self.taking_part - parameters)


@dataclass(frozen=True, eq=False)
class _Fingerprint:
    """By what changed gradients are known without computing all over again.

    Attributes:
        versions: Where each of them is, and how often torch has written to it, as a DTensor and to the local part.
        prints: Numbers that depend on the value and the place of every element.
    """

    versions: Sequence[tuple[int, int, int]]
    prints: Tensor

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
        self.buckets = {str(number): bucket for number, bucket in enumerate(buckets)}
        self.step = step
        self._groups, self._config = groups, config
        self._in_flight: dict[str, InFlight] = {}
        self._seen: dict[str, _Fingerprint] = {}
        # What is sent early is encoded beside the reductions of backward, which do not wait for it.
        self._side = SideStream(local_tensor(buckets[0].parameters[0]).device if buckets else torch.device("cpu"))

    def start_early(self, key: str, gradients: Gradients) -> None:
        """As :meth:`start`, before the step, which will ask :meth:`differs`."""
        with self._side.use():
            self._seen[key] = _Fingerprint.of(self.buckets[key].parameters, gradients)
            self.start(key, gradients)

    def wait_for_early(self) -> None:
        """Go on when everything that was sent early is encoded; on CUDA only the current stream waits."""
        self._side.join()

    def start(self, key: str, gradients: Gradients) -> None:
        """Encode a bucket and send it; every gradient is there. The residuals stay as they are.

        Collective over the nodes; every rank of them must call it, in the same order of buckets.
        """
        bucket, number = self.buckets[key], ExchangeStep(self.step, int(key))
        self._groups.send_sums(self.step)
        bucket.accumulate(gradients, self._config.decay)
        sent = bucket.encode(number)
        exchange = Exchange(bucket.plan, sent, self._groups, due=self.step + self._config.delay)
        self._in_flight[key] = InFlight(bucket, exchange, sent, number)

    def drop(self, key: str) -> None:
        """Wait for a bucket whose result is not wanted."""
        self.wait_for_early()
        self._in_flight.pop(key).exchange.result(self._config.merge)

    def differs(self, key: str, gradients: Gradients) -> Tensor:
        """Whether :meth:`start_early` would send something else now; a bool on the device."""
        self.wait_for_early()
        bucket = self.buckets[key]
        before, now = self._seen[key], _Fingerprint.of(bucket.parameters, gradients)
        if before.versions == now.versions:
            # Memory that is written to behind torch's back, by ``grad.data.mul_(2)``, keeps its version.
            return (before.prints != now.prints).any()
        return bucket.is_accumulated(gradients, self._config.decay).logical_not()

    def run(self, gradients: Gradients, sent: Collection[str]) -> list[InFlight]:
        """Send what is not on its way, and take from the residuals what is sent.

        Collective over the nodes; every rank of them must call it with the same parameters in ``gradients``.

        Args:
            gradients: Local gradient of each parameter that takes part in the step.
            sent: Buckets that are on their way.
        """
        self.wait_for_early()
        in_flight: list[InFlight] = []
        for key, bucket in self.buckets.items():
            taking_part = frozenset(tensor for tensor in bucket.parameters if tensor in gradients)
            if not taking_part:
                continue
            if key not in sent:
                self.start(key, filled(bucket.parameters, gradients))
            started = self._in_flight[key]
            bucket.settle(started.sent, started.number, taking_part)
            in_flight.append(replace(started, taking_part=taking_part))
            self._groups.send_sums(self.step)
        self._in_flight.clear()
        return in_flight


class Updates(dict[Tensor, Tensor]):
    """Update of each parameter that takes part, float32; one that may still be on its way is waited for when needed.

    Args:
        in_flight: Buckets in their order.
        config: How they are merged, and whether signs are taken.
        late: Updates of before, which are added.
    """

    def __init__(
        self, in_flight: Sequence[InFlight], config: FlexDeMoConfig, late: Mapping[Tensor, Tensor] | None = None
    ) -> None:
        super().__init__()
        on_their_way = {tensor for one in in_flight for tensor in one.taking_part}
        self._late = {tensor: update for tensor, update in (late or {}).items() if tensor in on_their_way}
        self.update({tensor: update for tensor, update in (late or {}).items() if tensor not in on_their_way})
        self._config = config
        self._waiting = list(in_flight)
        self._promised = on_their_way | self.keys()

    def __contains__(self, tensor: object) -> bool:
        return tensor in self._promised

    def __missing__(self, tensor: Tensor) -> Tensor:
        while self._waiting:
            self._receive(self._waiting.pop(0))
            if dict.__contains__(self, tensor):
                return self[tensor]
        raise KeyError(tensor)

    def receive_all(self) -> None:
        """Wait for all that is on its way."""
        while self._waiting:
            self._receive(self._waiting.pop(0))

    def _receive(self, one: InFlight) -> None:
        merged = one.exchange.result(self._config.merge)
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

    @override
    def _start(self, key: str, gradients: Gradients) -> None:
        self._exchanges.start_early(key, gradients)

    @override
    def _wait_until_read(self, key: str) -> None:
        self._exchanges.wait_for_early()

    @override
    def _drop(self, key: str) -> None:
        self._exchanges.drop(key)

    @override
    def _differs(self, key: str, gradients: Gradients) -> Tensor:
        return self._exchanges.differs(key, gradients)


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
            self._delayed = [one.without({parameter}) for one in self._delayed]
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
        parameters = trained.trainable
        self._residuals = {tensor: trained.states[tensor]["residual"] for tensor in parameters}
        residuals = {tensor: local_tensor(residual)[0] for tensor, residual in self._residuals.items()}
        buckets = [MomentumBucket(plan, parameters, residuals) for plan in self._plans(parameters)]
        self._exchanges = BucketExchanges(buckets, self.groups, self.config, step=num_steps)
        return EarlyExchanges(self._exchanges, names) if self.config.overlap != "step" else None

    @property
    @override
    def order(self) -> list[list[Tensor]]:
        return [bucket.parameters for bucket in self._exchanges.buckets.values()] if self._exchanges else []

    @override
    def updates(self, trained: Trained, gradients: Gradients, sent_early: frozenset[str]) -> Gradients:
        if self.num_nodes == 1:
            return self._of_one_node(trained, gradients)
        assert self._exchanges is not None, "plan comes first"
        due: Sequence[InFlight] = self._exchanges.run(gradients, sent_early)
        late = self._take_late(trained)
        if self.config.delay:
            # What has been frozen since is not moved any more.
            due, self._delayed = (
                [one.without({t for t in one.taking_part if not t.requires_grad}) for one in self._delayed],
                due,
            )
        self._updates = Updates(due, self.config, late)
        return self._updates

    @override
    def finish(self, trained: Trained, num_steps: int) -> None:
        # What nobody has asked for must not be taken for a later message.
        if self._updates is not None:
            self._updates.receive_all()
            self._updates = None
        if self._exchanges is not None:
            self._exchanges.step = num_steps

    @override
    def finish_in_flight(self, states: States) -> None:
        delayed, self._delayed = self._delayed, ()
        updates = Updates(delayed, self.config)
        for tensor in [tensor for one in delayed for tensor in one.bucket.parameters if tensor in one.taking_part]:
            state = states[tensor]
            if not state.keys() >= self.own_state:
                continue  # The parameter begins anew.
            local_tensor(state["delayed_update"]).copy_(updates[tensor])
            state["has_delayed_update"].fill_(1)
            self._has_late = True

    @override
    def load(self, parameter: Tensor, state: dict[str, Any], saved: Mapping[str, Any]) -> None:
        self._delayed, self._has_loaded, self._has_late = (), True, True
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
