"""The messages of one bucket between the nodes, in one leg or, where values are summed up on the way, in two."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import Work

from lightning_muon.comm.collectives import Delivery, start_messages, start_messages_together
from lightning_muon.comm.groups import AxisGroup
from lightning_muon.flexdemo.bucket import cut, merged, pack, unpack
from lightning_muon.flexdemo.bucket_plan import BucketPlan
from lightning_muon.flexdemo.replicators import Components


@dataclass(frozen=True, eq=False)
class NodeGroups:
    """The ranks of all nodes that hold the same shards."""

    reduce_group: AxisGroup  # For what every rank sends first.
    gather_group: AxisGroup  # For the sums. A separate group: ranks interleave reduce and gather differently.
    # Exchanges whose sums are still to be sent, in the order in which they were begun, equal on all ranks.
    waiting: deque[Exchange] = field(default_factory=deque["Exchange"])

    def send_sums(self, step: int) -> None:
        """Send the sums that the step with this number waits for, as far as they can be sent without waiting.

        Those of later steps stay: ranks differ in which they could send, and there may be no later step in which all
        of them have sent the same.
        """
        while self.waiting and self.waiting[0].due <= step and self.waiting[0].start_last_leg(wait=False):
            self.waiting.popleft()

    def send_sums_until(self, exchange: Exchange) -> None:
        """Send all sums up to those of ``exchange``; waits for what they are made of."""
        while exchange in self.waiting:
            self.waiting.popleft().start_last_leg(wait=True)


@dataclass(eq=False)
class Exchange:
    """One bucket on its way.

    Made by every rank of ``groups``, in the same order, which is the collective part; so is :meth:`result`. Nothing
    travels if no rank holds anything of the bucket.
    """

    plan: BucketPlan  # Of the bucket.
    own: Sequence[Components]  # What this node sends, rounded.
    groups: NodeGroups  # Who takes part.
    due: int = 0  # Number of the step that takes the result.
    _works: Sequence[Work | Delivery] = ()
    _sent: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    _received: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    _total: Tensor | None = None  # The sum that this node sends to all others.

    def __post_init__(self) -> None:
        plan, rank, num_nodes = self.plan, self.groups.reduce_group.rank, self.groups.reduce_group.size
        if not plan.parts:
            return
        if plan.is_summed(num_nodes):
            sends = {node: pack(plan, cut(plan, self.own, node, num_nodes)) for node in self._others()}
            size = plan.message_bytes(rank, num_nodes)
            self._send(sends, dict.fromkeys(sends, size), self.groups.reduce_group)
            self.groups.waiting.append(self)
        else:
            sends = dict.fromkeys(self._others(), pack(plan, self.own))
            self._send(sends, dict.fromkeys(sends, plan.message_bytes()), self.groups.reduce_group)

    def start_last_leg(self, *, wait: bool) -> bool:
        """Add up what has arrived and send the sums; ``False`` if it has not arrived, which ``wait`` waits for."""
        if not wait and not all(work.is_completed() for work in self._works):
            return False
        group, dtype = self.groups.gather_group, self.plan.returned_dtype
        messages = self._messages()
        of_nodes = [
            cut(self.plan, self.own, node, group.size)
            if node == group.rank
            else unpack(self.plan, messages[node], group.rank, group.size)
            for node in range(group.size)
        ]
        means = merged(self.plan, of_nodes, "mean")
        self._total = torch.cat([values.view(-1) for values, _ in means]).to(dtype)
        sends = dict.fromkeys(self._others(), self._total.view(torch.uint8))
        sizes = {node: dtype.itemsize * sum(self.plan.segment_lengths(node, group.size)) for node in sends}
        self._send(sends, sizes, group)
        return True

    def result(self, rule: str) -> list[Components]:
        """What the nodes sent, merged; waits for it."""
        self.groups.send_sums_until(self)
        rank, num_nodes = self.groups.reduce_group.rank, self.groups.reduce_group.size
        if not self.plan.parts:
            return []
        messages = self._messages()
        if self._total is None:
            of_nodes = [self.own if node == rank else unpack(self.plan, messages[node]) for node in range(num_nodes)]
            return merged(self.plan, of_nodes, rule)
        sums = {node: message.view(self._total.dtype) for node, message in messages.items()} | {rank: self._total}
        by_node = [sums[node].float().split(self.plan.segment_lengths(node, num_nodes)) for node in range(num_nodes)]
        return [Components(torch.cat(pieces)[None], None) for pieces in zip(*by_node, strict=True)]

    def _others(self) -> list[int]:
        return [node for node in range(self.groups.reduce_group.size) if node != self.groups.reduce_group.rank]

    def _send(self, sends: dict[int, Tensor], sizes: dict[int, int], group: AxisGroup) -> None:
        """Begin one leg, with messages of ``sizes`` from the others."""
        device = self.own[0].values.device
        self._sent = sends  # Until they have arrived.
        self._received = {node: torch.empty(size, dtype=torch.uint8, device=device) for node, size in sizes.items()}
        start = start_messages_together if self.plan.is_summed(group.size) else start_messages
        self._works = start(
            {node: message for node, message in sends.items() if message.numel()},
            {node: message for node, message in self._received.items() if message.numel()},
            group,
        )

    def _messages(self) -> dict[int, Tensor]:
        for work in self._works:
            work.wait()
        self._works = ()
        return self._received
