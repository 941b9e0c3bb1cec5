"""The messages of one bucket between the nodes, in one leg or, where values are summed up on the way, in two."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import Work

from lightning_muon.comm.collectives import start_messages
from lightning_muon.comm.groups import AxisGroup
from lightning_muon.flexdemo.bucket import MomentumBucket, cut, merged, pack, unpack
from lightning_muon.flexdemo.replicators import Components, ExchangeStep


class Exchange:
    """What is in the blocks of a bucket, on its way, while the bucket takes the next step.

    Collective over ``groups`` (see :attr:`InterNodeSync.groups`) to construct, and so are its methods that communicate;
    every rank must call them in the same order of buckets. Nothing travels if no rank holds anything of the bucket.
    """

    def __init__(self, bucket: MomentumBucket, number: ExchangeStep, groups: Sequence[AxisGroup]) -> None:
        reduce_group, self._gather_group = groups
        self._bucket, self._number, self._plan = bucket, number, bucket.plan
        self._own = bucket.encode(number)  # What this node sends, rounded.
        self.taking_part: set[Tensor] = set(bucket.parameters)  # The parameters that are updated by it.
        plan, own = self._plan, self._own
        self._rank, self._num_nodes = reduce_group.rank, reduce_group.size
        self._others = [node for node in range(self._num_nodes) if node != self._rank]
        self._total: Tensor | None = None  # The sum that this node sends to all others.
        if plan.is_summed(self._num_nodes):
            sends = {node: pack(plan, cut(plan, own, node, self._num_nodes)) for node in self._others}
            size = plan.message_bytes(self._rank, self._num_nodes)
            self._send(sends, dict.fromkeys(sends, size), reduce_group)
        elif plan.parts:
            sends = dict.fromkeys(self._others, pack(plan, own))
            self._send(sends, dict.fromkeys(sends, plan.message_bytes()), reduce_group)

    def settle(self, taking_part: set[Tensor]) -> None:
        """Take what was sent from the residuals of the parameters that take part; local."""
        self.taking_part = taking_part
        self._bucket.settle(self._own, self._number, taking_part)

    def updates(self, rule: str, *, sign: bool) -> dict[Tensor, Tensor]:
        """Update of each parameter that takes part, float32; waits for what the nodes have sent."""
        return self._bucket.decode(self.result(rule), self._number, self.taking_part, sign=sign)

    def send_sums(self) -> None:
        """Add up what has arrived and send the sums, if that was not done; waits for what they are made of."""
        plan, num_nodes = self._plan, self._num_nodes
        if self._total is not None or not plan.is_summed(num_nodes):
            return
        messages = self._messages()
        of_nodes = [
            cut(plan, self._own, node, num_nodes)
            if node == self._rank
            else unpack(plan, messages[node], self._rank, num_nodes)
            for node in range(num_nodes)
        ]
        dtype = plan.returned_dtype
        self._total = torch.cat([values.view(-1) for values, _ in merged(plan, of_nodes, "mean")]).to(dtype)
        sends = dict.fromkeys(self._others, self._total.view(torch.uint8))
        sizes = {node: dtype.itemsize * sum(plan.segment_lengths(node, num_nodes)) for node in sends}
        self._send(sends, sizes, self._gather_group)

    def result(self, rule: str) -> list[Components]:
        """What the nodes sent, merged; waits for it."""
        self.send_sums()
        plan, nodes = self._plan, range(self._num_nodes)
        if not plan.parts:
            return []
        messages = self._messages()
        if self._total is None:
            return merged(plan, [self._own if n == self._rank else unpack(plan, messages[n]) for n in nodes], rule)
        sums = {node: message.view(self._total.dtype) for node, message in messages.items()} | {self._rank: self._total}
        by_node = [sums[node].float().split(plan.segment_lengths(node, self._num_nodes)) for node in nodes]
        return [Components(torch.cat(pieces)[None], None) for pieces in zip(*by_node, strict=True)]

    def _send(self, sends: dict[int, Tensor], sizes: dict[int, int], group: AxisGroup) -> None:
        """Begin one leg, with messages of ``sizes`` from the others."""
        device = self._own[0].values.device
        self._sent = sends  # Until they have arrived.
        self._received = {node: torch.empty(size, dtype=torch.uint8, device=device) for node, size in sizes.items()}
        self._works: Sequence[Work] = start_messages(
            {node: message for node, message in sends.items() if message.numel()},
            {node: message for node, message in self._received.items() if message.numel()},
            group,
        )

    def _messages(self) -> dict[int, Tensor]:
        for work in self._works:
            work.wait()
        self._works = ()
        return self._received
