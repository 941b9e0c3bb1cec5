"""Packs the momenta of some parameters of one rank into a message, and makes updates from the messages of all nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set

import torch
from torch import Tensor
from torch.distributed import Work

from lightning_muon.comm.collectives import start_messages
from lightning_muon.comm.groups import AxisGroup
from lightning_muon.compat import foreach
from lightning_muon.flexdemo.bucket_plan import ALIGNMENT, BucketPlan, MessagePart, Place
from lightning_muon.flexdemo.replicators import Components, ExchangeStep
from lightning_muon.flexdemo.wire import as_bytes, index_dtype
from lightning_muon.params.layout import local_tensor

# Coefficients of blocks that are summed at a time on a CPU: 2 MiB, which stay in a cache.
_SUMMED_TOGETHER = 1 << 19


class MomentumBucket:
    """Parameters that are sent together; ``residuals``, like their shards in float32, are read and written.

    ``parameters`` are those of all buckets, by the numbers in ``plan``.
    """

    def __init__(self, plan: BucketPlan, parameters: Sequence[Tensor], residuals: Mapping[Tensor, Tensor]) -> None:
        self.plan = plan
        self.parameters = [parameters[number] for number in plan.members]
        self._all, self._residuals = parameters, residuals
        self._device = next(iter(residuals.values())).device
        self._batches = [torch.zeros(part.batch_shape, dtype=torch.float32, device=self._device) for part in plan.parts]
        batches = zip(plan.parts, self._batches, strict=True)
        self._views = [self._views_of(part, batch, residuals) for part, batch in batches]

    def load(self) -> None:
        """Blocks <- residuals."""
        for part, batch, views in zip(self.plan.parts, self._batches, self._views, strict=True):
            if batch.numel() > sum(place.rows * place.cols for place in part.places):
                batch.zero_()  # Some elements belong to no parameter.
            foreach.copy_([into for _, into, _ in views], [residual for _, _, residual in views])

    def accumulate(self, gradients: Mapping[Tensor, Tensor], decay: float) -> None:
        """Blocks <- decay * residual + gradient, with the local gradient of every parameter."""
        gradients = {tensor: gradients[tensor].contiguous() for tensor in self.parameters}
        self.load()
        for part, batch in zip(self.plan.parts, self._batches, strict=True):
            batch.mul_(decay)
            views = self._views_of(part, batch, gradients)
            foreach.add_([into for _, into, _ in views], [gradient for _, _, gradient in views])

    def is_accumulated(self, gradients: Mapping[Tensor, Tensor], decay: float) -> Tensor:
        """Whether :meth:`accumulate` would change nothing; a bool on the device."""
        again = MomentumBucket(self.plan, self._all, self._residuals)
        again.accumulate(gradients, decay)
        same = [(one == other).all() for one, other in zip(again._batches, self._batches, strict=True)]
        return torch.stack([torch.ones((), dtype=torch.bool, device=self._device), *same]).all()

    def encode(self, number: ExchangeStep) -> list[Components]:
        """Components to send of each part, with values in the wire shape, rounded as the other nodes get them."""
        components: list[Components] = []
        for part, batch in zip(self.plan.parts, self._batches, strict=True):
            values, indices = part.replicator.encode(batch, number)
            rounded = part.values.rounded(values.reshape(part.wire_shape()))
            if rounded.untyped_storage().data_ptr() == batch.untyped_storage().data_ptr():
                rounded = rounded.clone()  # The batch changes while the values are being sent.
            components.append(Components(rounded, indices))
        return components

    def subtract_sent(self, sent: Sequence[Components], number: ExchangeStep, taking_part: Collection[Tensor]) -> None:
        """Residual <- blocks - what was sent, for the parameters that take part in the step."""
        for part, batch, views, components in zip(self.plan.parts, self._batches, self._views, sent, strict=True):
            part.replicator.subtract_(batch, _by_block(part, components), number)
            wanted = [(blocks, residual) for tensor, blocks, residual in views if tensor in taking_part]
            if wanted:
                foreach.copy_([residual for _, residual in wanted], [blocks for blocks, _ in wanted])

    def decode(
        self, merged: Sequence[Components], number: ExchangeStep, wanted: Set[Tensor], *, sign: bool
    ) -> dict[Tensor, Tensor]:
        """Update of each wanted parameter from merged components: float32, with the shape of its shard."""
        updates = {
            tensor: torch.empty(local_tensor(tensor).shape, dtype=torch.float32, device=self._device)
            for tensor in self.parameters
            if tensor in wanted
        }
        for part, components in zip(self.plan.parts, merged, strict=True):
            total = components.values.sum()  # Not finite if any value is not.
            blocks = part.replicator.decode(_by_block(part, components), part.batch_shape[1:], number)
            if sign:
                blocks = blocks.sign_().add_(total, alpha=0)  # As in signs().
            views = self._views_of(part, blocks, updates)
            if views:
                foreach.copy_([update for _, _, update in views], [source for _, source, _ in views])
        return updates

    def _views_of(
        self, part: MessagePart, batch: Tensor, locals_: Mapping[Tensor, Tensor]
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Triples: a parameter, views of a batch, and views of the same elements in ``locals_``."""
        return [
            (tensor, in_batch, in_local)
            for place in part.places
            if (tensor := self._all[place.number]) in locals_
            for in_batch, in_local in paired_views(part, place, batch, locals_[tensor])
        ]


def signs(values: Tensor) -> Tensor:
    """Signs 1, 0 and -1; NaN where ``values`` are not finite: with torch's 0 a training would stop unnoticed."""
    return values.sign().add_(values, alpha=0)


def _by_block(part: MessagePart, components: Components) -> Components:
    """Components with the values of each block in a row, as replicators have them."""
    return components._replace(values=components.values.view(part.num_blocks, -1))


def cut(plan: BucketPlan, components: Sequence[Components], node: int, num_nodes: int) -> list[Components]:
    """The part of the components, at indices common to all nodes, that ``node`` adds up."""
    return [
        Components(values[:, part.segment(node, num_nodes)], None)
        for part, (values, _) in zip(plan.parts, components, strict=True)
    ]


def pack(plan: BucketPlan, components: Sequence[Components]) -> Tensor:
    """Pack all indices and values into one message: (message_bytes,) uint8."""
    pieces: list[Tensor] = []
    for part, (values, indices) in zip(plan.parts, components, strict=True):
        packed_indices = [] if indices is None else [as_bytes(indices.to(index_dtype(part.block_numel)))]
        for piece in (*packed_indices, part.values.pack(values)):
            pieces += [piece, piece.new_zeros(-piece.numel() % ALIGNMENT)]
    return torch.cat(pieces)


def unpack(plan: BucketPlan, message: Tensor, node: int = 0, num_nodes: int = 1) -> list[Components]:
    """Inverse of :func:`pack`, for all components or for the part that ``node`` adds up."""
    components: list[Components] = []
    rest = message
    for part in plan.parts:
        own, rest = rest.tensor_split([part.message_bytes(node, num_nodes)])
        indices, shape = None, part.wire_shape(node, num_nodes)
        if part.replicator.sends_indices:
            packed = own[: part.index_bytes].view(index_dtype(part.block_numel))
            indices = packed.to(torch.int64).view(shape)
            own = own[-(-part.index_bytes // ALIGNMENT) * ALIGNMENT :]
        components.append(Components(part.values.unpack(own[: part.values.num_bytes(*shape)], *shape), indices))
    return components


def merged(plan: BucketPlan, of_nodes: Sequence[Sequence[Components]], rule: str) -> list[Components]:
    """The mean over the nodes, part by part; ``of_nodes`` in the order of the nodes."""
    return [
        merge([components[index] for components in of_nodes], rule, part.block_numel)
        for index, part in enumerate(plan.parts)
    ]


def paired_views(part: MessagePart, place: Place, batch: Tensor, local: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Equally shaped views of ``batch`` and ``local`` (row-major) that hold each element of ``local`` once."""
    rows, cols = place.rows, place.cols
    if len(part.block_shape) != 2:
        first = place.first * (part.block_numel if part.block_shape else 1)
        yield batch.view(-1)[first : first + rows * cols], local.view(-1)
        return
    (height, width), matrix = part.block_shape, local.view(rows, cols)
    own = batch[place.first : place.first + place.count].view(-(-rows // height), -(-cols // width), height, width)
    # The whole blocks, those at the right and lower edges, and the one in the corner.
    for down, row, tall in _bands(rows, height):
        for right, col, wide in _bands(cols, width):
            blocks = own[down, right, :tall, :wide].transpose(1, 2)
            yield blocks, matrix[row, col].unflatten(0, (-1, tall)).unflatten(2, (-1, wide))


def _bands(length: int, side: int) -> list[tuple[slice, slice, int]]:
    """The whole blocks of one dimension, and the shorter one after them: their numbers, elements, and side."""
    num_whole = length // side
    bands = [(slice(0, num_whole), slice(0, num_whole * side), side)] if num_whole else []
    if length % side:
        bands.append((slice(num_whole, None), slice(num_whole * side, None), length % side))
    return bands


def merge(components: Sequence[Components], rule: str, block_numel: int) -> Components:
    """Average over the nodes; the indices of all lie side by side, (num_blocks, R * num_sent), with each mean once.

    With ``rule="mean"`` sums are divided by the number of nodes; with ``"contributors"`` by the number of those that
    sent a value other than 0 for the coefficient (DeMo, Peng et al. 2024, arXiv:2411.19870). Nodes are added in order,
    so that every node gets the same bits on any device. If several nodes sent an index, the first one has the mean and
    the others have 0, so that a decoder may add them up in any order.
    """
    num_nodes = len(components)
    if num_nodes == 1:
        return components[0]
    indices = [part.indices for part in components if part.indices is not None]
    if not indices:  # All nodes sent all coefficients.
        total = components[0].values.clone()
        for part in components[1:]:
            total.add_(part.values)
        return Components(total.div_(num_nodes), None)
    sent = torch.stack([part.values for part in components])
    means = torch.empty_like(sent)
    num_blocks = sent.size(1)
    size = max(1, _SUMMED_TOGETHER // block_numel) if sent.device.type == "cpu" else max(1, num_blocks)
    sums = sent.new_zeros(min(size, num_blocks), block_numel)
    for first in range(0, num_blocks, size):
        group = slice(first, first + size)
        of_group = [part[group] for part in indices]
        _sum(sums, of_group, sent[:, group], means[:, group])
        if rule == "mean":
            means[:, group].div_(num_nodes)
        else:
            num_contributors = (sent[:, group] != 0).float()
            _sum(sums, of_group, num_contributors, num_contributors)
            means[:, group].div_(num_contributors.clamp_min_(1))
    return Components(torch.cat(means.unbind(), 1), torch.cat(indices, 1))


def _sum(zeros: Tensor, indices: Sequence[Tensor], of_nodes: Tensor, out: Tensor) -> None:
    """Write the sum at each index to ``out`` for the first node that has it, else 0; ``out`` may be ``of_nodes``."""
    sums = zeros[: of_nodes.size(1)]  # Zeros again afterwards.
    for places, values in zip(indices, of_nodes, strict=True):
        # Not scatter_add_, whose order differs from run to run on CUDA.
        sums.scatter_(1, places, sums.gather(1, places).add_(values))
    for places, total in zip(indices, out, strict=True):
        torch.gather(sums, 1, places, out=total)
        sums.scatter_(1, places, 0.0)


class Exchange:
    """The exchange of the components of a bucket; the bucket may take the next step in the meantime.

    Collective over ``groups`` (see :attr:`InterNodeSync.groups`) to construct, and so are its methods that communicate;
    every rank must call them in the same order of buckets. Nothing is sent if no rank holds anything of the bucket.
    """

    def __init__(self, bucket: MomentumBucket, number: ExchangeStep, groups: Sequence[AxisGroup]) -> None:
        reduce_group, self._gather_group = groups
        self._bucket, self._number, self._plan = bucket, number, bucket.plan
        self._own = bucket.encode(number)  # The rounded components that this node sends.
        self.taking_part: set[Tensor] = set(bucket.parameters)  # The parameters that it updates.
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

    def subtract_sent(self, taking_part: set[Tensor]) -> None:
        """Subtract what was sent from the residuals of the parameters that take part; local."""
        self.taking_part = taking_part
        self._bucket.subtract_sent(self._own, self._number, taking_part)

    def updates(self, rule: str, *, sign: bool) -> dict[Tensor, Tensor]:
        """Return the update of each parameter that takes part, float32; waits for the messages of the nodes."""
        return self._bucket.decode(self.result(rule), self._number, self.taking_part, sign=sign)

    def send_sums(self) -> None:
        """Wait for the segments, add them up and send the sums, unless that was done."""
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
        """Wait for the messages of all nodes, and return the merged components."""
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
        """Begin to send, and to receive messages of ``sizes`` from the others."""
        device = self._own[0].values.device
        self._sent = sends  # Kept alive until they have arrived.
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
