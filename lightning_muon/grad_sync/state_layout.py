"""Optimizer state in two layouts: whole tensors on their owners as the step wants them, and rows as DTensors.

The second is the layout of FSDP2, so that DCP saves, loads and reshards such state like that of FSDP2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lightning_muon.comm.agreement import fail_together, require_equal
from lightning_muon.comm.exchange import parts, start_all_to_all
from lightning_muon.comm.mesh import AxisGroup
from lightning_muon.grad_sync.holdings import Holdings
from lightning_muon.params.layout import OwnedBy

# Bounds the two buffers of an exchange; a larger tensor travels alone.
_BATCH_BYTES = 64 * 2**20


def to_rows(tensors: Sequence[Tensor], parameters: Sequence[Tensor], holdings: Holdings) -> list[DTensor]:
    """Return the state as DTensors, divided by rows over the shard axis, and replicated where parameters are.

    Bit-exact; :func:`to_owners` is the way back. State that does not travel shares memory with what is given.
    Collective over the shard axis; every rank must call it.

    Args:
        tensors: For each parameter this rank's part of the state, of the shape of ``holdings.local(parameter)`` and of
            any dtype, the same on all ranks.
        parameters: One for each tensor; one parameter may have several.
        holdings: Where the parts lie.

    Raises:
        ValueError: On all ranks, if a tensor has another shape than its part.
        RuntimeError: On all ranks, if the ranks bring different tensors.
    """
    held = [holdings.boxes(parameter)[holdings.shard.rank].shape for parameter in parameters]
    _check(tensors, held, lambda tensor: tuple(tensor.shape), holdings)
    result = list(tensors)
    for batch in _batches(tensors, parameters, holdings):
        pieces = [
            _Piece(index, _owner(parameters[index], holdings), rank, start, shape)
            for index in batch
            for rank, (start, shape) in enumerate(_rows(parameters[index], holdings))
        ]
        for piece, received in _exchange(pieces, tensors, holdings.shard):
            result[piece.index] = received.clone()
    return [_as_dtensor(local, parameter, holdings) for local, parameter in zip(result, parameters, strict=True)]


def to_owners(tensors: Sequence[DTensor], parameters: Sequence[Tensor], holdings: Holdings) -> list[Tensor]:
    """Return this rank's part of each state tensor, of the shape of ``holdings.local(parameter)``.

    Bit-exact; :func:`to_rows` is the way back. State that does not travel shares memory with what is given.
    Collective over the shard axis; every rank must call it.

    Args:
        tensors: DTensors as :func:`to_rows` returns them.
        parameters: One for each tensor; one parameter may have several.
        holdings: Where the parts shall lie.

    Raises:
        ValueError: On all ranks, if a tensor is no DTensor, or is laid out in another way.
        RuntimeError: On all ranks, if the ranks bring different tensors.
    """
    layouts = [(tuple(parameter.shape), _row_placements(parameter, holdings)) for parameter in parameters]
    _check(tensors, layouts, lambda tensor: _layout_on(tensor, holdings), holdings)
    result = [tensor.to_local() for tensor in tensors]
    for batch in _batches(tensors, parameters, holdings):
        pieces = [
            _Piece(index, rank, _owner(parameters[index], holdings), 0, shape)
            for index in batch
            for rank, (_, shape) in enumerate(_rows(parameters[index], holdings))
        ]
        arrived: defaultdict[int, list[Tensor]] = defaultdict(list)
        for piece, received in _exchange(pieces, result, holdings.shard):
            arrived[piece.index].append(received)
        for index in batch:
            shape = holdings.boxes(parameters[index])[holdings.shard.rank].shape
            result[index] = torch.cat(arrived[index]) if arrived[index] else result[index].new_empty(shape)
    return result


@dataclass(frozen=True)
class _Piece:
    """Some rows of the ``index``-th tensor on their way between two ranks of the shard axis.

    Attributes:
        index: Of the tensor.
        source: Rank that sends the rows.
        target: Rank that receives them.
        start: First row in the local tensor of ``source``.
        shape: Of the rows.
    """

    index: int
    source: int
    target: int
    start: int
    shape: tuple[int, ...]


def _exchange(pieces: Sequence[_Piece], tensors: Sequence[Tensor], group: AxisGroup) -> Iterator[tuple[_Piece, Tensor]]:
    """Yield what this rank gets, by source, as views of one buffer.

    Collective over ``group``; every rank of it must call it with equal ``pieces``.

    Args:
        pieces: All of one batch, at least one; of one dtype and device.
        tensors: Local tensors that the pieces are cut from.
        group: The ranks.
    """
    # Stable sorts, so that sender and receiver have the pieces of a pair of ranks in the same order.
    leaving = sorted((piece for piece in pieces if piece.source == group.rank), key=lambda piece: piece.target)
    coming = sorted((piece for piece in pieces if piece.target == group.rank), key=lambda piece: piece.source)
    to = parts([piece.target for piece in leaving], [piece.shape for piece in leaving], group.size)
    source = parts([piece.source for piece in coming], [piece.shape for piece in coming], group.size)
    like = tensors[pieces[0].index]
    rows = [tensors[piece.index][piece.start : piece.start + piece.shape[0]] for piece in leaving]
    send = torch.cat([like.new_empty(0), *(part.reshape(-1) for part in rows)])
    if group.size == 1:
        receive = send
    else:
        receive = like.new_empty(source.numel)
        for work in start_all_to_all(send, to, receive, source, group):
            work.wait()
    yield from zip(coming, source.views(receive), strict=True)


def _batches(tensors: Sequence[Tensor], parameters: Sequence[Tensor], holdings: Holdings) -> Iterator[list[int]]:
    """Indices of the state that lies with owners, by dtype and device, so many at a time as the bound allows."""
    kinds: defaultdict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
    for index, (tensor, parameter) in enumerate(zip(tensors, parameters, strict=True)):
        if isinstance(holdings.placements(parameter)[-1], OwnedBy):
            kinds[tensor.dtype, tensor.device].append(index)
    for (dtype, _), indices in kinds.items():
        batch: list[int] = []
        num_bytes = 0
        for index in indices:
            size = parameters[index].numel() * dtype.itemsize
            if batch and num_bytes + size > _BATCH_BYTES:
                yield batch
                batch, num_bytes = [], 0
            batch.append(index)
            num_bytes += size
        yield batch


def _owner(parameter: Tensor, holdings: Holdings) -> int:
    placement = holdings.placements(parameter)[-1]
    assert isinstance(placement, OwnedBy)
    return placement.rank


def _rows(parameter: Tensor, holdings: Holdings) -> list[tuple[int, tuple[int, ...]]]:
    """First row and shape of what each rank of the shard axis has of a tensor that is divided by rows."""
    return [(box.start[0], box.shape) for box in holdings.boxes_as(parameter, Shard(0))]


def _row_placements(parameter: Tensor, holdings: Holdings) -> tuple[Placement, ...]:
    divided = Shard(0) if holdings.is_divided(parameter) else Replicate()
    return (*(Replicate() for _ in range(holdings.mesh.ndim - 1)), divided)


def _as_dtensor(local: Tensor, parameter: Tensor, holdings: Holdings) -> DTensor:
    return DTensor.from_local(
        local,
        holdings.mesh,
        _row_placements(parameter, holdings),
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _layout_on(tensor: Tensor, holdings: Holdings) -> Any:
    """Shape and placements of a DTensor on the mesh of ``holdings``; of others what they are."""
    if not isinstance(tensor, DTensor):
        return tuple(tensor.shape), "no DTensor"
    if tensor.device_mesh != holdings.mesh:
        return tuple(tensor.shape), f"on {tensor.device_mesh}"
    return tuple(tensor.shape), tuple(tensor.placements)


def _check(
    tensors: Sequence[Tensor], wanted: Sequence[Any], layout: Callable[[Tensor], Any], holdings: Holdings
) -> None:
    """Raise on all ranks together unless all have tensors of the ``wanted`` layouts, of equal dtypes."""
    found = [layout(tensor) for tensor in tensors]
    wrong = [index for index, (one, other) in enumerate(zip(found, wanted, strict=False)) if one != other]
    error = None
    if len(found) != len(wanted):
        error = ValueError(
            f"{len(found)} state tensors came with {len(wanted)} parameters; give one parameter for each"
        )
    elif wrong:
        error = ValueError(
            f"state tensor {wrong[0]} is laid out as {found[wrong[0]]}, but its parameter wants {wanted[wrong[0]]}; "
            "give the part of the state that belongs to this rank's part of the parameter"
        )
    if holdings.shard.size > 1:
        fail_together(error, holdings.shard.group)
        lines = [(f"tensor {index}", f"{tensor.dtype} on {tensor.device.type}") for index, tensor in enumerate(tensors)]
        require_equal(lines, holdings.shard.group, "optimizer state")
    elif error is not None:
        raise error
