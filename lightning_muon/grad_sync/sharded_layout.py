"""The layout of ZeRO-2 as an optimizer sees it: replicated parameters, sharded gradients and optimizer state.

State has two layouts: whole matrices on their owners, as the step wants them, and DTensors that are sharded by rows, as
checkpoints want them. The second is the layout of FSDP2, so that DCP saves, loads and reshards both alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from typing_extensions import override

from lightning_muon.comm.agreement import fail_together, require_equal
from lightning_muon.comm.collectives import parts, start_all_to_all
from lightning_muon.comm.groups import AxisGroup
from lightning_muon.grad_sync.parameter_all_gather import ParameterAllGather
from lightning_muon.grad_sync.reducer import GradientReducer
from lightning_muon.grad_sync.shard_map import ShardMap
from lightning_muon.grad_sync.transports import ReduceScatterToOwners
from lightning_muon.params.layout import AxisPlacement, Layout, OwnedBy, StepPart
from lightning_muon.schedule.program import ALL_GATHER, GRADIENTS, IN_BACKWARD, REDUCE_SCATTER, SENT, TRANSFER, Op
from lightning_muon.schedule.step import AddedOps

# In the key of the second sum of a bucket in a step.
_REST = " rest"


class ShardedLayout(Layout):
    """Tells an optimizer to update the calling rank's parts only, and sends them to the other ranks.

    Args:
        shard_map: Who updates what.
        reducer: Gradients come from here, ...
        gradients: ... through this.
        all_gather: Sends new values.
    """

    def __init__(
        self,
        shard_map: ShardMap,
        reducer: GradientReducer,
        gradients: ReduceScatterToOwners,
        all_gather: ParameterAllGather,
    ) -> None:
        super().__init__(shard_map.mesh)
        self.may_arrive_late = shard_map.mesh.size() > 1
        self._updating: Collection[Tensor] = ()
        self._shard_map, self._reducer, self._gradients, self._all_gather = shard_map, reducer, gradients, all_gather

    def finish_gradients(self) -> None:
        """Every gradient has been sent; see :meth:`GradientReducer.finish`.

        Collective over the mesh; every rank must call it.
        """
        is_known = self._reducer.finish() is not None
        self.agreed = self._reducer.present if is_known else None
        self.arrives_late = self.may_arrive_late

    @override
    def mesh_and_placements(self, parameter: Tensor) -> tuple[DeviceMesh, tuple[AxisPlacement, ...]]:
        return self._shard_map.mesh, self._shard_map.placements(parameter)

    @override
    def local(self, parameter: Tensor) -> Tensor:
        return self._shard_map.local(parameter)

    @override
    def has_gradient(self, parameter: Tensor) -> bool:
        return self._reducer.is_present(parameter)

    @override
    def gradient(self, parameter: Tensor) -> Tensor | None:
        return self._gradients.reduced(parameter)

    @override
    def forget(self, parameters: Collection[Tensor]) -> None:
        self._reducer.forget(parameters)

    @override
    def begin_step(self, parameters: Collection[Tensor]) -> None:
        """Wait for what the last step has sent. A step can be given up until its first update."""
        self._updating = parameters
        self.agreed = None
        self._all_gather.begin(parameters)

    @override
    def in_order(self, parameters: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
        wanted = set(parameters)
        batches = [[p for p in bucket.parameters if p in wanted] for bucket in self._reducer.buckets]
        return [batch for batch in batches if batch]

    @override
    def updated(self, parameters: Collection[Tensor]) -> None:
        """The ops of :meth:`step_part` send them."""
        self._all_gather.updated(parameters, sends=False)

    @override
    def step_part(self, done: Mapping[str, Sequence[Tensor]]) -> StepPart:
        """The sums of gradients in backward, and an all-gather of each bucket behind the op that has done it."""
        group = tuple(range(self._shard_map.shard.size))
        if len(group) == 1:
            return StepPart()
        # The second time with what has come after its bucket had gone.
        first = [
            Op(
                kind=REDUCE_SCATTER,
                key=_key(bucket.index) + rest,
                rank=0,
                lane=TRANSFER,
                bytes=sum(parameter.nbytes for parameter in bucket.parameters),
                group=group,
                phase=IN_BACKWARD,
                when=(SENT,),
            )
            for rest in ("", _REST)
            for bucket in self._reducer.buckets
        ]
        names = list(done)
        place_of = {tensor: place for place, name in enumerate(names) for tensor in done[name]}
        after: dict[str, list[Op]] = {}
        place = 0
        for index, bucket in enumerate(self._all_gather.buckets):
            places = {place_of[parameter] for parameter in bucket if parameter in place_of}
            if places:
                place = max(place, *places)  # Buckets leave in their order.
                op = Op(
                    kind=ALL_GATHER,
                    key=_key(index),
                    rank=0,
                    lane=TRANSFER,
                    bytes=sum(parameter.nbytes for parameter in bucket),
                    deps=tuple(names[each] for each in sorted(places)),
                    group=group,
                    when=(GRADIENTS,),
                )
                after.setdefault(names[place], []).append(op)
        return StepPart(
            ops=AddedOps(first=first, after=after), actions={ALL_GATHER: self._start_all_gather}, facts=self._facts
        )

    def _start_all_gather(self, op: Op) -> Sequence[Any]:
        """Collective over the shard axis. Whoever reads the parameters waits for them."""
        self._all_gather.send(_index(op.key))
        return ()

    def _facts(self, parameters: Collection[Tensor]) -> Mapping[str, Collection[str]]:
        """Which buckets of gradients were sent, and which parameters take part."""
        sent: set[str] = set()
        last, rest = -1, ""
        for index, _ in self._reducer.traffic.launches:
            rest = _REST if index <= last else rest
            last = index
            sent.add(_key(index) + rest)
        return {
            SENT: sent,
            GRADIENTS: {
                _key(index)
                for index, bucket in enumerate(self._all_gather.buckets)
                if any(parameter in parameters for parameter in bucket)
            },
        }

    @override
    def end_step(self) -> None:
        """Use up the gradients. Collective over the shard axis; every rank must call it."""
        self._all_gather.finish_updates()
        self.forget(self._updating)

    @override
    def zeros_like(self, parameter: Tensor) -> Tensor:
        """A DTensor where rows are sharded, a plain tensor on its owner, empty elsewhere."""
        local = torch.zeros_like(self.local(parameter))
        return self._as_rows(parameter, local) if self._has_rows(parameter) else local

    @override
    def saved(self, states: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """States as a checkpoint has them. Collective over the shard axis; every rank must call it."""
        result = [state for _, state in states]
        owned = self._owned(states)
        rows = to_rows([states[index][1] for index in owned], [states[index][0] for index in owned], self._shard_map)
        for index, state in zip(owned, rows, strict=True):
            result[index] = state
        return result

    @override
    def loaded(self, states: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """The inverse of :meth:`saved`. Collective over the shard axis; every rank must call it."""
        result = [self._part_of_whole(parameter, state) for parameter, state in states]
        rows = {index: each for index in self._owned(states) if isinstance(each := result[index], DTensor)}
        owned = list(rows)
        parts = to_owners(list(rows.values()), [states[index][0] for index in owned], self._shard_map)
        for index, state in zip(owned, parts, strict=True):
            result[index] = state
        return result

    def _owned(self, states: Sequence[tuple[Tensor, Tensor]]) -> list[int]:
        """Positions of the states of parameters that lie on one rank as a whole."""
        return [i for i, (p, _) in enumerate(states) if isinstance(self._shard_map.placements(p)[-1], OwnedBy)]

    def _has_rows(self, parameter: Tensor) -> bool:
        return isinstance(self._shard_map.placements(parameter)[-1], Shard)

    def _part_of_whole(self, parameter: Tensor, state: Tensor) -> Tensor:
        """The calling rank's part where ``state`` is a whole plain tensor."""
        if isinstance(state, DTensor):
            return state
        part = self._shard_map.local(parameter, state.contiguous()).clone()
        return self._as_rows(parameter, part) if self._has_rows(parameter) else part

    def _as_rows(self, parameter: Tensor, local: Tensor) -> DTensor:
        return DTensor.from_local(
            local,
            self._shard_map.mesh,
            _row_placements(parameter, self._shard_map),
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


# Bounds the two buffers of an exchange; a larger tensor travels alone.
_BATCH_BYTES = 64 * 2**20


def to_rows(tensors: Sequence[Tensor], parameters: Sequence[Tensor], shard_map: ShardMap) -> list[DTensor]:
    """Return the state as DTensors, divided by rows over the shard axis, and replicated where parameters are.

    Bit-exact; :func:`to_owners` is the way back. State that does not travel shares memory with what is given.
    Collective over the shard axis; every rank must call it.

    Args:
        tensors: For each parameter this rank's part of the state, of the shape of ``shard_map.local(parameter)`` and of
            any dtype, the same on all ranks.
        parameters: One for each tensor; one parameter may have several.
        shard_map: Where the parts lie.

    Raises:
        ValueError: On all ranks, if a tensor has another shape than its part.
        RuntimeError: On all ranks, if the ranks bring different tensors.
    """
    held = [shard_map.boxes(parameter)[shard_map.shard.rank].shape for parameter in parameters]
    _check(tensors, held, lambda tensor: tuple(tensor.shape), shard_map)
    result = list(tensors)
    for batch in _batches(tensors, parameters, shard_map):
        pieces = [
            _Piece(index, _owner(parameters[index], shard_map), rank, start, shape)
            for index in batch
            for rank, (start, shape) in enumerate(_rows(parameters[index], shard_map))
        ]
        for piece, received in _exchange(pieces, tensors, shard_map.shard):
            result[piece.index] = received.clone()
    return [_as_dtensor(local, parameter, shard_map) for local, parameter in zip(result, parameters, strict=True)]


def to_owners(tensors: Sequence[DTensor], parameters: Sequence[Tensor], shard_map: ShardMap) -> list[Tensor]:
    """Return this rank's part of each state tensor, of the shape of ``shard_map.local(parameter)``.

    Bit-exact; :func:`to_rows` is the way back. State that does not travel shares memory with what is given.
    Collective over the shard axis; every rank must call it.

    Args:
        tensors: DTensors as :func:`to_rows` returns them.
        parameters: One for each tensor; one parameter may have several.
        shard_map: Where the parts shall lie.

    Raises:
        ValueError: On all ranks, if a tensor is no DTensor, or is laid out in another way.
        RuntimeError: On all ranks, if the ranks bring different tensors.
    """
    layouts = [(tuple(parameter.shape), _row_placements(parameter, shard_map)) for parameter in parameters]
    _check(tensors, layouts, lambda tensor: _layout_on(tensor, shard_map), shard_map)
    result = [tensor.to_local() for tensor in tensors]
    for batch in _batches(tensors, parameters, shard_map):
        pieces = [
            _Piece(index, rank, _owner(parameters[index], shard_map), 0, shape)
            for index in batch
            for rank, (_, shape) in enumerate(_rows(parameters[index], shard_map))
        ]
        arrived: defaultdict[int, list[Tensor]] = defaultdict(list)
        for piece, received in _exchange(pieces, result, shard_map.shard):
            arrived[piece.index].append(received)
        for index in batch:
            shape = shard_map.boxes(parameters[index])[shard_map.shard.rank].shape
            result[index] = torch.cat(arrived[index]) if arrived[index] else result[index].new_empty(shape)
    return result


@dataclass(frozen=True)
class _Piece:
    """Some rows of the ``index``-th tensor on their way between two ranks of the shard axis."""

    index: int  # Of the tensor.
    source: int  # Rank that sends the rows.
    target: int  # Rank that receives them.
    start: int  # First row in the local tensor of `source`.
    shape: tuple[int, ...]  # Of the rows.


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


def _batches(tensors: Sequence[Tensor], parameters: Sequence[Tensor], shard_map: ShardMap) -> Iterator[list[int]]:
    """Indices of the state that lies with owners, by dtype and device, so many at a time as the bound allows."""
    kinds: defaultdict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
    for index, (tensor, parameter) in enumerate(zip(tensors, parameters, strict=True)):
        if isinstance(shard_map.placements(parameter)[-1], OwnedBy):
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


def _owner(parameter: Tensor, shard_map: ShardMap) -> int:
    placement = shard_map.placements(parameter)[-1]
    assert isinstance(placement, OwnedBy)
    return placement.rank


def _rows(parameter: Tensor, shard_map: ShardMap) -> list[tuple[int, tuple[int, ...]]]:
    """First row and shape of what each rank of the shard axis has of a tensor that is divided by rows."""
    return [(box.start[0], box.shape) for box in shard_map.boxes_as(parameter, Shard(0))]


def _row_placements(parameter: Tensor, shard_map: ShardMap) -> tuple[Placement, ...]:
    divided = Shard(0) if shard_map.is_sharded(parameter) else Replicate()
    return (*(Replicate() for _ in range(shard_map.mesh.ndim - 1)), divided)


def _as_dtensor(local: Tensor, parameter: Tensor, shard_map: ShardMap) -> DTensor:
    return DTensor.from_local(
        local,
        shard_map.mesh,
        _row_placements(parameter, shard_map),
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _layout_on(tensor: Tensor, shard_map: ShardMap) -> Any:
    """Shape and placements of a DTensor on the mesh of ``shard_map``; of others what they are."""
    if not isinstance(tensor, DTensor):
        return tuple(tensor.shape), "no DTensor"
    if tensor.device_mesh != shard_map.mesh:
        return tuple(tensor.shape), f"on {tensor.device_mesh}"
    return tuple(tensor.shape), tuple(tensor.placements)


def _check(
    tensors: Sequence[Tensor], wanted: Sequence[Any], layout: Callable[[Tensor], Any], shard_map: ShardMap
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
    if shard_map.shard.size > 1:
        fail_together(error, shard_map.shard.group)
        lines = [(f"tensor {index}", f"{tensor.dtype} on {tensor.device.type}") for index, tensor in enumerate(tensors)]
        require_equal(lines, shard_map.shard.group, "optimizer state")
    elif error is not None:
        raise error


def _key(index: int) -> str:
    """Of the ops of a bucket of parameters."""
    return f"parameters.{index}"


def _index(key: str) -> int:
    return int(key.rpartition(".")[2])
