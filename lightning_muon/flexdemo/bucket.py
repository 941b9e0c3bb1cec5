"""The momenta of some parameters of one rank: into a message, and back from the messages of all nodes; local."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set

import torch
from torch import Tensor

from lightning_muon.compat import foreach
from lightning_muon.flexdemo.bucket_plan import BucketPlan, Part, Place, aligned, message_bytes
from lightning_muon.flexdemo.replicator import Components, ExchangeStep
from lightning_muon.flexdemo.wire import pack_indices, unpack_indices
from lightning_muon.params.layout import local_tensor

MERGE_RULES = ("contributors", "mean")
# Coefficients of blocks that are summed at a time on a CPU: 2 MiB, which stay in a cache.
_SUMMED_TOGETHER = 1 << 19


class MomentumBucket:
    """Parameters that travel together. What they have in common is done for all of them at once.

    Args:
        plan: Parts and places.
        parameters: Of all buckets, by the numbers in ``plan``.
        residuals: Momentum that is not sent yet, float32, laid out like the shards; read and written.
    """

    def __init__(self, plan: BucketPlan, parameters: Sequence[Tensor], residuals: Mapping[Tensor, Tensor]) -> None:
        self.plan = plan
        self.parameters = [parameters[number] for number in plan.members]
        self._all = parameters
        self._residuals = residuals
        device = next(iter(residuals.values())).device
        self._batches = [torch.zeros(part.batch_shape, dtype=torch.float32, device=device) for part in plan.parts]
        self._pairs = [
            [
                (parameters[place.number], list(paired_views(part, place, batch, residuals[parameters[place.number]])))
                for place in part.places
            ]
            for part, batch in zip(plan.parts, self._batches, strict=True)
        ]

    def accumulate(self, gradients: Mapping[Tensor, Tensor], decay: float) -> None:
        """Blocks <- decay * residual + gradient, with the local gradient of every parameter."""
        gradients = {tensor: gradients[tensor].contiguous() for tensor in self.parameters}
        for part, batch, pairs in zip(self.plan.parts, self._batches, self._pairs, strict=True):
            if part.has_padding:
                batch.zero_()
            into, residuals = _flat(pair for _, of_parameter in pairs for pair in of_parameter)
            _, added = self._views(part, batch, gradients)
            if batch.device.type == "cpu":
                # Piece by piece, so that the sum finds the product in a cache.
                for target, residual, gradient in zip(into, residuals, added, strict=True):
                    torch.mul(residual, decay, out=target).add_(gradient)
            else:
                _copy_(into, residuals)
                batch.mul_(decay)
                foreach.add_(into, added)

    def load(self, values: Mapping[Tensor, Tensor]) -> None:
        """Blocks <- values, of the shapes of the shards of the parameters."""
        in_order = {tensor: values[tensor].contiguous() for tensor in self.parameters}
        for part, batch in zip(self.plan.parts, self._batches, strict=True):
            if part.has_padding:
                batch.zero_()
            _copy_(*self._views(part, batch, in_order))

    def is_accumulated(self, gradients: Mapping[Tensor, Tensor], decay: float) -> Tensor:
        """Whether :meth:`accumulate` would change nothing; a bool on the device."""
        again = MomentumBucket(self.plan, self._all, self._residuals)
        again.accumulate(gradients, decay)
        same = [(one == other).all() for one, other in zip(again._batches, self._batches, strict=True)]
        if not same:
            return torch.ones((), dtype=torch.bool, device=next(iter(self._residuals.values())).device)
        return torch.stack(same).all()

    def encode(self, number: ExchangeStep) -> list[Components]:
        """What is sent of each part: values as the others will get them."""
        components: list[Components] = []
        for part, batch in zip(self.plan.parts, self._batches, strict=True):
            found = part.replicator.encode(batch, number)
            rounded = part.values.rounded(found.values.reshape(part.wire_shape))
            if rounded.untyped_storage().data_ptr() == batch.untyped_storage().data_ptr():
                rounded = rounded.clone()  # The batch changes while the values are on their way.
            components.append(Components(rounded.view(part.num_blocks, part.num_sent), found.indices))
        return components

    def settle(self, sent: Sequence[Components], number: ExchangeStep, taking_part: Collection[Tensor]) -> None:
        """Residual <- blocks - what was sent, for the parameters that take part in the step."""
        for part, batch, pairs, components in zip(self.plan.parts, self._batches, self._pairs, sent, strict=True):
            part.replicator.subtract_(batch, components, number)
            from_blocks, into = _flat(pair for tensor, own in pairs if tensor in taking_part for pair in own)
            _copy_(into, from_blocks)

    def decode(
        self, merged: Sequence[Components], number: ExchangeStep, wanted: Set[Tensor], *, sign: bool
    ) -> dict[Tensor, Tensor]:
        """Update of each wanted parameter from merged components: float32, with the shape of its shard."""
        updates = {
            tensor: torch.empty(local.shape, dtype=torch.float32, device=local.device)
            for tensor, local in ((tensor, local_tensor(tensor)) for tensor in self.parameters)
            if tensor in wanted
        }
        for part, components in zip(self.plan.parts, merged, strict=True):
            blocks = part.replicator.decode(components, part.batch_shape[1:], number)
            if sign:
                blocks = blocks.sign_().add_(components.values.sum(), alpha=0)  # As in signs().
            from_blocks, into = self._views(part, blocks, updates)
            _copy_(into, from_blocks)
        return updates

    def _views(self, part: Part, batch: Tensor, locals_: Mapping[Tensor, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Views of a batch, and of what there is of its parameters in the shape of their shards, in pairs."""
        return _flat(
            pair
            for place in part.places
            if self._all[place.number] in locals_
            for pair in paired_views(part, place, batch, locals_[self._all[place.number]])
        )


def signs(values: Tensor) -> Tensor:
    """1, 0 and -1; NaN where ``values`` are NaN or infinite: with torch's 0 a training would stand still unnoticed."""
    return values.sign().add_(values, alpha=0)


def _flat(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """Pairs of tensors as a pair of lists."""
    listed = list(pairs)
    return [one for one, _ in listed], [other for _, other in listed]


def _copy_(into: list[Tensor], source: list[Tensor]) -> None:
    if into:
        foreach.copy_(into, source)


def pack(plan: BucketPlan, components: Sequence[Components]) -> Tensor:
    """One message with all indices and values: (message_bytes,) uint8."""
    device = components[0].values.device if components else None
    message = torch.zeros(message_bytes(plan), dtype=torch.uint8, device=device)
    offset = 0
    for part, (values, indices) in zip(plan.parts, components, strict=True):
        if indices is not None:
            message[offset : offset + part.index_bytes] = pack_indices(indices, part.block_numel)
            offset += aligned(part.index_bytes)
        message[offset : offset + part.value_bytes] = part.values.pack(values.reshape(part.wire_shape))
        offset += aligned(part.value_bytes)
    return message


def unpack(plan: BucketPlan, message: Tensor) -> list[Components]:
    """Inverse of :func:`pack`."""
    components: list[Components] = []
    offset = 0
    for part in plan.parts:
        indices = None
        if part.replicator.sends_indices:
            packed = message[offset : offset + part.index_bytes]
            indices = unpack_indices(packed, part.num_blocks, part.num_sent, part.block_numel)
            offset += aligned(part.index_bytes)
        values = part.values.unpack(message[offset : offset + part.value_bytes], *part.wire_shape)
        components.append(Components(values.view(part.num_blocks, part.num_sent), indices))
        offset += aligned(part.value_bytes)
    return components


def merged(plan: BucketPlan, of_nodes: Sequence[Sequence[Components]], rule: str) -> list[Components]:
    """The mean over the nodes, part by part; ``of_nodes`` in the order of the nodes."""
    return [
        merge([components[index] for components in of_nodes], rule, part.block_numel)
        for index, part in enumerate(plan.parts)
    ]


def paired_views(part: Part, place: Place, batch: Tensor, local: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of equally shaped views of ``batch`` and ``local`` that together hold each element of ``local`` once.

    The padding of the blocks is in none of them.

    Args:
        part: The batch.
        place: The parameter.
        batch: (num_blocks, *block_shape).
        local: The parameter's shard, or something of its shape, in row-major order.
    """
    if len(part.block_shape) == 2:
        yield from _squares(part, place, batch, local)
    else:
        size = part.block_numel if part.block_shape else 1
        first = place.first * size
        yield batch.view(-1)[first : first + place.rows * place.cols], local.view(-1)


def _squares(part: Part, place: Place, batch: Tensor, local: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The whole blocks, those at the lower and the right edge, and the corner."""
    height, width = part.block_shape
    rows, cols = place.rows, place.cols
    down, right = -(-rows // height), -(-cols // width)
    whole_down, whole_right = rows // height, cols // width
    own = batch[place.first : place.first + place.count].view(down, right, height, width)
    matrix = local.view(rows, cols)
    inner_rows, inner_cols = whole_down * height, whole_right * width
    if whole_down and whole_right:
        inner = matrix[:inner_rows, :inner_cols].unflatten(0, (whole_down, height)).unflatten(2, (whole_right, width))
        yield own[:whole_down, :whole_right].transpose(1, 2), inner
    if inner_rows < rows and whole_right:
        below = matrix[inner_rows:, :inner_cols].unflatten(1, (whole_right, width))
        yield own[whole_down, :whole_right, : rows - inner_rows].transpose(0, 1), below
    if inner_cols < cols and whole_down:
        beside = matrix[:inner_rows, inner_cols:].unflatten(0, (whole_down, height))
        yield own[:whole_down, whole_right, :, : cols - inner_cols], beside
    if inner_rows < rows and inner_cols < cols:
        corner = own[whole_down, whole_right, : rows - inner_rows, : cols - inner_cols]
        yield corner, matrix[inner_rows:, inner_cols:]


def merge(components: Sequence[Components], rule: str, block_numel: int) -> Components:
    """One set of components for the mean over the nodes: indices of all nodes side by side, each mean once.

    With ``rule="mean"`` sums over the nodes are divided by their number R, ``sum_r v_r / R``; with ``"contributors"``
    by the number of nodes that sent the coefficient, as another number than 0 (DeMo, Peng et al. 2024,
    arXiv:2411.19870). Where indices are shared all nodes sent all coefficients, and both are the mean of the values.

    Sums are made node by node, so that every node gets the same bits on any device. Of several nodes that sent a
    position the first one has the mean and the others have 0, so that a decoder may add them up in any order.

    Args:
        components: What each node sent, in the order of the nodes; equal shapes, no position twice in a block.
        rule: ``"contributors"`` or ``"mean"``.
        block_numel: Elements of a block.

    Returns:
        (num_blocks, R * num_sent) values and indices; with shared indices (num_blocks, num_sent) values.
    """
    if rule not in MERGE_RULES:
        raise ValueError(f"merge must be one of {', '.join(MERGE_RULES)}, got {rule!r}")
    num_nodes = len(components)
    if num_nodes == 1:
        return components[0]
    indices = [part.indices for part in components if part.indices is not None]
    if not indices:
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
    """Write the sum over the nodes at each position into ``out``, for the first node that has it; 0 for the others.

    Args:
        zeros: (at least num_blocks, block_numel); zeros again afterwards.
        indices: Of each node, (num_blocks, num_sent).
        of_nodes: Values (num_nodes, num_blocks, num_sent), added in the order of the nodes.
        out: Of the same shape, or the same tensor.
    """
    sums = zeros[: of_nodes.size(1)]
    for places, values in zip(indices, of_nodes, strict=True):
        # Not scatter_add_, whose order differs from run to run on CUDA.
        sums.scatter_(1, places, sums.gather(1, places).add_(values))
    for places, merged in zip(indices, out, strict=True):
        torch.gather(sums, 1, places, out=merged)
        sums.scatter_(1, places, 0.0)
