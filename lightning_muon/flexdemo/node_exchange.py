"""The messages of one bucket between the nodes, in one leg or, where values are summed up on the way, in two."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import Work

from lightning_muon.comm.collectives import Delivery, start_messages, start_messages_together
from lightning_muon.comm.groups import AxisGroup
from lightning_muon.flexdemo.bucket import merged, pack, unpack
from lightning_muon.flexdemo.bucket_plan import (
    BucketPlan,
    aligned,
    is_summed,
    returned_dtype,
    segment,
    segment_bytes,
)
from lightning_muon.flexdemo.replicator import Components

# A handle of messages that are on their way.
Messages = Work | Delivery


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
    _works: Sequence[Messages] = ()
    _received: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    _kept: list[Tensor] = field(default_factory=list[Tensor])

    def __post_init__(self) -> None:
        group = self.groups.reduce_group
        others = self._others()
        if not self.plan.parts:
            return
        if is_summed(self.plan, group.size):
            sends = {node: pack_segment(self.plan, self.own, node, group.size) for node in others}
            sizes = dict.fromkeys(others, segment_bytes(self.plan, group.rank, group.size))
            self._send(sends, sizes, group, start_messages_together)
            self.groups.waiting.append(self)
        else:
            message = pack(self.plan, self.own)
            sizes = dict.fromkeys(others, message.numel())
            self._send(dict.fromkeys(others, message), sizes, group, start_messages)

    def start_last_leg(self, *, wait: bool) -> bool:
        """Add up what has arrived and send the sums; ``False`` if it has not arrived, which ``wait`` waits for."""
        if not wait and not all(work.is_completed() for work in self._works):
            return False
        group = self.groups.gather_group
        total = sum_of_segments(self.plan, self.own, self._messages(), group.rank, group.size)
        self._kept = [total]
        sizes = {node: total.element_size() * sum(self._lengths(node)) for node in self._others()}
        sends = dict.fromkeys(self._others(), total.view(torch.uint8))
        self._send(sends, sizes, group, start_messages_together)
        return True

    def result(self, rule: str) -> list[Components]:
        """What the nodes sent, merged; waits for it."""
        self.groups.send_sums_until(self)
        group = self.groups.reduce_group
        if not self.plan.parts:
            return []
        if not is_summed(self.plan, group.size):
            messages = self._messages()
            of_nodes = [
                self.own if node == group.rank else unpack(self.plan, messages[node]) for node in range(group.size)
            ]
            return merged(self.plan, of_nodes, rule)
        dtype = returned_dtype(self.plan)
        sums = {node: message.view(dtype) for node, message in self._messages().items()} | {group.rank: self._kept[0]}
        by_node = [sums[node].float().split(self._lengths(node)) for node in range(group.size)]
        return [
            Components(torch.cat([parts[index] for parts in by_node]).view(part.num_blocks, part.num_sent), None)
            for index, part in enumerate(self.plan.parts)
        ]

    def _others(self) -> list[int]:
        return [node for node in range(self.groups.reduce_group.size) if node != self.groups.reduce_group.rank]

    def _lengths(self, node: int) -> list[int]:
        """Values of each part that a node adds up."""
        ranges = [segment(part, node, self.groups.reduce_group.size) for part in self.plan.parts]
        return [stop - start for start, stop in ranges]

    def _send(
        self,
        sends: dict[int, Tensor],
        sizes: dict[int, int],
        group: AxisGroup,
        start: Callable[..., Sequence[Messages]],
    ) -> None:
        device = self.own[0].values.device
        self._received = {node: torch.empty(size, dtype=torch.uint8, device=device) for node, size in sizes.items()}
        self._kept += sends.values()
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


def pack_segment(plan: BucketPlan, components: Sequence[Components], node: int, num_nodes: int) -> Tensor:
    """The values that a node adds up: (segment_bytes,) uint8."""
    device = components[0].values.device
    message = torch.zeros(segment_bytes(plan, node, num_nodes), dtype=torch.uint8, device=device)
    offset = 0
    for part, (values, _) in zip(plan.parts, components, strict=True):
        start, stop = segment(part, node, num_nodes)
        if stop > start:
            packed = part.values.pack(values.reshape(1, -1)[:, start:stop])
            message[offset : offset + packed.numel()] = packed
            offset += aligned(packed.numel())
    return message


def sum_of_segments(
    plan: BucketPlan, own: Sequence[Components], messages: dict[int, Tensor], node: int, num_nodes: int
) -> Tensor:
    """The mean over the nodes of the values that ``node`` adds up, 1-D, as it is sent back.

    Args:
        plan: Of the bucket.
        own: Components of ``node``.
        messages: What the others sent it; see :func:`pack_segment`.
        node: Which one.
        num_nodes: How many there are.
    """
    means: list[Tensor] = []
    offset = 0
    for part, (values, _) in zip(plan.parts, own, strict=True):
        start, stop = segment(part, node, num_nodes)
        if stop == start:
            continue
        size = part.values.num_bytes(1, stop - start)
        of_nodes = [
            values.reshape(-1)[start:stop]
            if other == node
            else part.values.unpack(messages[other][offset : offset + size], 1, stop - start).view(-1)
            for other in range(num_nodes)
        ]
        total = of_nodes[0].clone()
        for others in of_nodes[1:]:
            total += others
        means.append(total.div_(num_nodes))
        offset += aligned(size)
    device = own[0].values.device
    return (torch.cat(means) if means else torch.empty(0, device=device)).to(returned_dtype(plan))
