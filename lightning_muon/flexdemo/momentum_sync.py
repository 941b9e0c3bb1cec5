"""The exchange of all buckets in a step: what is sent early, what the step sends, and the updates that come of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_muon.comm.reduce_scatter import SideStream
from lightning_muon.flexdemo.bucket import Bucket, signs
from lightning_muon.flexdemo.bucket_plan import BucketPlan, Shape, plan_buckets, sent_bytes
from lightning_muon.flexdemo.inter_node_sync import BetweenNodes, OptimizerView
from lightning_muon.flexdemo.node_exchange import Exchange, Nodes
from lightning_muon.flexdemo.node_state import Rule, local_of_nodes, part_of
from lightning_muon.flexdemo.replicator import Components, Replicator, Turn, check_blocks
from lightning_muon.optim.backward_prefetch import BackwardPrefetch, filled
from lightning_muon.optim.matrix_step import Gradients
from lightning_muon.params.layout import local_tensor


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What momenta become; see :class:`~lightning_muon.flexdemo.config.FlexDeMoConfig`."""

    decay: float
    merge: str
    sign: bool


@dataclass(frozen=True, eq=False)
class InFlight:
    """A bucket on its way.

    Attributes:
        bucket: Which.
        exchange: Its messages.
        sent: What this node sends.
        turn: When.
        taking_part: The parameters that are updated by it.
    """

    bucket: Bucket
    exchange: Exchange
    sent: Sequence[Components]
    turn: Turn
    taking_part: frozenset[Tensor] = frozenset()

    def without(self, parameters: Set[Tensor]) -> InFlight:
        """Without an update of ``parameters``."""
        return replace(self, taking_part=self.taking_part - parameters)


@dataclass(frozen=True, eq=False)
class _Seen:
    """By what changed gradients are known without computing all over again.

    Attributes:
        versions: Where each of them is, and how often torch has written to it, as a DTensor and to the local part.
        prints: Numbers that depend on the value and the place of every element.
        scales: Their factors.
    """

    versions: Sequence[tuple[int, int, int]]
    prints: Tensor
    scales: Mapping[Tensor, float]

    @classmethod
    def of(cls, parameters: Sequence[Tensor], gradients: Gradients, scales: Mapping[Tensor, float]) -> _Seen:
        versions = [
            (gradients[p].data_ptr(), gradients[p]._version, -1 if p.grad is None else p.grad._version)
            for p in parameters
        ]
        return cls(versions, _fingerprints([gradients[p] for p in parameters]), scales)


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


class Replication:
    """The buckets of one rank.

    Args:
        buckets: In the order in which backward finishes them.
        nodes: The ranks that hold the same shards.
        rules: What momenta become.
        scales: Factors of the gradients of some parameters, equal on all nodes.
        delay: Steps after which the updates are taken.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        nodes: Nodes,
        rules: Rules,
        scales: Callable[[], Mapping[Tensor, float]],
        *,
        delay: int = 0,
    ) -> None:
        self.buckets = {str(number): bucket for number, bucket in enumerate(buckets)}
        self._nodes, self._rules = nodes, rules
        self._in_flight: dict[str, InFlight] = {}
        self._seen: dict[str, _Seen] = {}
        self._scales, self._delay = scales, delay
        # What is sent early is encoded beside the reductions of backward, which do not wait for it.
        self._side = SideStream(local_tensor(buckets[0].parameters[0]).device if buckets else torch.device("cpu"))
        # Number of the next step, equal on all nodes.
        self.step = 0

    def start_early(self, key: str, gradients: Gradients) -> None:
        """As :meth:`start`, before the step, which will ask :meth:`differs`."""
        with self._side.use():
            self._seen[key] = _Seen.of(self.buckets[key].parameters, gradients, self._scales())
            self.start(key, gradients)

    def wait_for_early(self) -> None:
        """Go on when everything that was sent early is encoded; on CUDA only the current stream waits."""
        self._side.join()

    def start(self, key: str, gradients: Gradients) -> None:
        """Encode a bucket and send it; every gradient is there. The residuals stay as they are.

        Collective over the nodes; every rank of them must call it, in the same order of buckets.
        """
        bucket, turn = self.buckets[key], Turn(self.step, int(key))
        self._nodes.bring_forward(self.step)
        bucket.accumulate(gradients, self._rules.decay, self._scales())
        sent = bucket.encode(turn)
        exchange = Exchange(bucket.plan, sent, self._nodes, due=self.step + self._delay)
        self._in_flight[key] = InFlight(bucket, exchange, sent, turn)

    def drop(self, key: str) -> None:
        """Wait for a bucket whose result is not wanted."""
        self.wait_for_early()
        self._in_flight.pop(key).exchange.result(self._rules.merge)

    def differs(self, key: str, gradients: Gradients) -> Tensor:
        """Whether :meth:`start_early` would send something else now; a bool on the device."""
        self.wait_for_early()
        parameters = self.buckets[key].parameters
        before, now = self._seen[key], _Seen.of(parameters, gradients, self._scales())
        if before.versions == now.versions and before.scales == now.scales:
            # Memory that is written to behind torch's back, by ``grad.data.mul_(2)``, keeps its version.
            return (before.prints != now.prints).any()
        return self.buckets[key].is_accumulated(gradients, self._rules.decay, self._scales()).logical_not()

    def run(self, gradients: Gradients, sent: Collection[str]) -> list[InFlight]:
        """Send what is not on its way, and let go from the momenta what is sent.

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
            bucket.settle(started.sent, started.turn, taking_part)
            in_flight.append(replace(started, taking_part=taking_part))
            self._nodes.bring_forward(self.step)
        self._in_flight.clear()
        return in_flight


class Updates(dict[Tensor, Tensor]):
    """Update of each parameter that takes part, float32; one that may still be on its way is waited for when needed.

    Args:
        in_flight: Buckets in their order.
        rules: How they are merged.
        late: Updates of before, which are added.
    """

    def __init__(
        self, in_flight: Sequence[InFlight], rules: Rules, late: Mapping[Tensor, Tensor] | None = None
    ) -> None:
        super().__init__()
        on_their_way = {tensor for one in in_flight for tensor in one.taking_part}
        self._late = {tensor: update for tensor, update in (late or {}).items() if tensor in on_their_way}
        self.update({tensor: update for tensor, update in (late or {}).items() if tensor not in on_their_way})
        self._rules = rules
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
        merged = one.exchange.result(self._rules.merge)
        updates = {
            tensor: torch.empty(local_tensor(tensor).shape, dtype=torch.float32, device=local_tensor(tensor).device)
            for tensor in one.bucket.parameters
            if tensor in one.taking_part
        }
        one.bucket.decode(merged, one.turn, updates, sign=self._rules.sign)
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
        replication: Of one plan.
        names: Of the parameters.
    """

    def __init__(self, replication: Replication, names: Mapping[Tensor, str]) -> None:
        chunks = {key: bucket.parameters for key, bucket in replication.buckets.items()}
        super().__init__(chunks, {key: names[tensors[0]] for key, tensors in chunks.items()})
        self._replication = replication

    def _start(self, key: str, gradients: Gradients) -> None:
        self._replication.start_early(key, gradients)

    def _wait_until_read(self, key: str) -> None:
        del key
        self._replication.wait_for_early()

    def _drop(self, key: str) -> None:
        self._replication.drop(key)

    def _differs(self, key: str, gradients: Gradients) -> Tensor:
        return self._replication.differs(key, gradients)


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
