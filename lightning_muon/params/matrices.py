"""The matrices that Newton-Schulz sees in a parameter, and where they lie."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, combinations, pairwise, product

from torch import Tensor

from lightning_muon.math.newton_schulz import Arithmetic, NewtonSchulz, NewtonSchulzOptions
from lightning_muon.params.layout import Box, RoutedParameter
from lightning_muon.params.routing import Route

Held = Mapping[int, Mapping[int, int]]
"""Replica -> its ranks with elements of a matrix -> how many."""


class ShardBoxes:
    """The boxes of one tensor, of at least one dimension, on the ranks of a group; they may be empty or overlap.

    The ranks of one replica hold the whole tensor together. By default all ranks are one replica.
    """

    def __init__(self, boxes: Sequence[Box], replica_of: Sequence[int] | None = None) -> None:
        self.boxes = tuple(boxes)
        self.replica_of = (0,) * len(boxes) if replica_of is None else tuple(replica_of)
        filled = [(rank, box) for rank, box in enumerate(boxes) if box.numel]
        # Along the dimension with most cuts, so that few boxes have to be looked at.
        extents = [{(box.start[dim], box.stop[dim]) for _, box in filled} for dim in range(len(boxes[0].start))]
        self._dim = max(range(len(extents)), key=lambda dim: len(extents[dim]))
        self._uncut = {dim: next(iter(found)) for dim, found in enumerate(extents) if len(found) == 1}
        self._filled = sorted(filled, key=lambda item: item[1].start[self._dim])
        self._starts = [box.start[self._dim] for _, box in self._filled]
        # The largest stop of each box and all before it.
        self._last_stops = list(accumulate((box.stop[self._dim] for _, box in self._filled), max))
        self._pieces: dict[Box, dict[int, Box]] = {}
        self._held: dict[tuple[object, ...], Held] = {}

    def pieces(self, box: Box) -> Mapping[int, Box]:
        """Rank -> its part of ``box``, by rank; ranks without elements of it are left out."""
        if box not in self._pieces:
            first = bisect_right(self._last_stops, box.start[self._dim])
            stop = bisect_left(self._starts, box.stop[self._dim])
            found = {rank: held.intersect(box) for rank, held in self._filled[first:stop]}
            self._pieces[box] = {rank: found[rank] for rank in sorted(found) if found[rank].numel}
        return self._pieces[box]

    def held(self, box: Box) -> Held:
        """How many elements of ``box`` each rank holds; one object for all boxes that lie alike.

        Raises a ``ValueError`` if they do not make up the box.
        """
        pattern = self._pattern(box)
        if pattern not in self._held:
            pieces, held = self.pieces(box), dict[int, dict[int, int]]()
            for rank, piece in pieces.items():
                held.setdefault(self.replica_of[rank], {})[rank] = piece.numel
            replica = [pieces[rank] for rank in next(iter(held.values()), ())]
            if not tile(replica, box):
                raise ValueError(f"no contiguous parts that make up the whole: {replica[:4]}")
            self._held[pattern] = held
        return self._held[pattern]

    def _pattern(self, box: Box) -> tuple[object, ...]:
        """Key that is equal for boxes that lie alike on the ranks, such as experts of a stack that is cut by rows."""
        places: list[object] = []
        for dim, (start, stop) in enumerate(zip(box.start, box.stop, strict=True)):
            first, last = self._uncut.get(dim, (stop, start))
            places.append(stop - start if first <= start and stop <= last else (start, stop))
        return tuple(places)


@dataclass(eq=False)
class Matrix:
    """A matrix of a parameter, read as ``rows x cols`` in row-major order; on the ranks of an exchange group."""

    parameter: RoutedParameter
    box: Box  # Where it is in the parameter.
    rows: int
    cols: int
    number: int  # Among the matrices of its parameter.
    shards: ShardBoxes  # Parts of its parameter on the ranks.
    rank: int  # The calling one.
    flops: int  # Cost of Newton-Schulz.
    owner: int = -1  # The rank that orthogonalizes it. The planner sets it.

    @property
    def name(self) -> str:
        """Name of its parameter, and which matrix of it."""
        route = self.parameter.route
        if route.kind == "stack":
            return f"{route.name}{list(self.box.start[:-2])}"
        return f"{route.name}[{self.number}]" if len(route.splits) > 1 else route.name

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.cols

    @property
    def is_transposed(self) -> bool:
        """Whether the columns are the outputs of the layer."""
        return self.parameter.route.is_transposed

    def newton_schulz(self, arithmetic: Arithmetic) -> NewtonSchulz:
        """How it is orthogonalized, by the current options of its param group."""
        return NewtonSchulzOptions.of(self.parameter.group).choice(self.rows, self.cols, arithmetic)

    @cached_property
    def held(self) -> Held:
        """How many of its elements each rank holds; matrices that lie alike share one object."""
        try:
            return self.shards.held(self.box)
        except ValueError as error:
            raise ValueError(
                f"the shards of {self.name} are {error}; ParallelMuon does not take this order of sharding"
            ) from None

    @cached_property
    def sole_holder(self) -> int | None:
        """The rank that holds all elements while no other has any."""
        ranks = [rank for replica in self.held.values() for rank in replica]
        return ranks[0] if len(ranks) == 1 else None

    @cached_property
    def pieces(self) -> Mapping[int, Box]:
        """Rank -> its part of the parameter, by rank; ranks without elements are left out."""
        return self.shards.pieces(self.box)

    @cached_property
    def _slices(self) -> tuple[slice, ...] | None:
        """The calling rank's part in its local tensor; ``None`` if that is all of it."""
        local, mine = self.shards.boxes[self.rank], self.pieces[self.rank]
        return None if mine == local else mine.slices_in(local)

    def local_view(self, local: Tensor) -> Tensor:
        """The calling rank's piece, which must have elements, in its local tensor: parameter, gradient or momentum."""
        return local if self._slices is None else local[self._slices]

    @cached_property
    def _parts(self) -> tuple[list[Box], tuple[int, tuple[int, ...]] | None]:
        """The different pieces, in order of their starts, and the ``Tensor.split`` that makes them, if there is one."""
        parts = sorted(set(self.pieces.values()), key=lambda part: part.start)
        return parts, cut_of(parts)

    def views(self, whole: Tensor) -> dict[tuple[int, ...], Tensor]:
        """The piece of every rank in a tensor that holds just the matrix; by the start of its box."""
        parts, cut = self._parts
        if cut is None:
            views = [whole[part.slices_in(self.box)] for part in parts]
        else:
            dim, sizes = cut
            views = whole.split(sizes, dim)  # Makes hundreds of views in the time of a few slices.
        return dict(zip((part.start for part in parts), views, strict=True))

    @property
    def num_neurons(self) -> int:
        """Number of outputs of the layer that the matrix has."""
        return self.cols if self.is_transposed else self.rows

    @property
    def neuron_box(self) -> Box:
        """The values of its neurons in a tensor of :func:`neuron_shape`."""
        route, start, stop = self.parameter.route, list(self.box.start), list(self.box.stop)
        kept = neuron_dims(tuple(self.parameter.tensor.shape), route)
        for dim in (dim for dim in range(len(start)) if dim not in kept):
            start[dim] = self.number if route.splits and dim == route.split_dim else 0
            stop[dim] = start[dim] + 1
        return Box(tuple(start), tuple(stop))


def neuron_dims(shape: tuple[int, ...], route: Route) -> tuple[int, ...]:
    """Dimensions of a parameter that count neurons (outputs of its layer), or in a stack also matrices."""
    every = range(len(shape))
    if route.kind == "stack":
        return tuple(every[:-2]) + ((every[-1],) if route.is_transposed else (every[-2],))
    return tuple(every[1:]) if route.is_transposed else (0,)


def neuron_shape(shape: tuple[int, ...], route: Route) -> tuple[int, ...]:
    """Shape of a tensor with a value for each neuron of each matrix of a parameter, in as many dimensions."""
    kept = neuron_dims(shape, route)
    parts = {route.split_dim: len(route.splits)} if route.splits else {}
    return tuple(size if dim in kept else parts.get(dim, 1) for dim, size in enumerate(shape))


def matrices_in(shape: tuple[int, ...], route: Route) -> list[tuple[Box, int, int]]:
    """Box, rows and columns of each matrix in a parameter of global ``shape``: its fused parts, or those of a stack."""
    if route.kind == "elementwise" or 0 in shape:
        return []
    if route.kind == "stack":
        *leading, rows, cols = shape
        places = product(*map(range, leading))
        return [(Box((*i, 0, 0), (*(each + 1 for each in i), rows, cols)), rows, cols) for i in places]
    dim, sizes = route.split_dim, route.splits or (shape[route.split_dim],)
    boxes = [
        Box((0,) * dim + (start,) + (0,) * (len(shape) - dim - 1), (*shape[:dim], stop, *shape[dim + 1 :]))
        for start, stop in pairwise(accumulate(sizes, initial=0))
    ]
    return [(box, box.shape[0], box.numel // box.shape[0]) for box in boxes]


def tile(parts: Sequence[Box], box: Box) -> bool:
    """Whether ``parts`` make up ``box`` without overlap; empty parts do not count."""
    filled = [part for part in parts if part.numel]
    if sum(part.numel for part in filled) != box.numel or len(set(filled)) != len(filled):
        return False
    return cut_of(filled) is not None or not any(one.intersect(other).numel for one, other in combinations(filled, 2))


def cut_of(parts: Iterable[Box]) -> tuple[int, tuple[int, ...]] | None:
    """Arguments (dimension, sizes) of ``Tensor.split`` if it makes the different ``parts``; else ``None``."""
    ordered = sorted(set(parts), key=lambda part: part.start)
    cut = [dim for dim in range(len(ordered[0].start)) if len({(p.start[dim], p.stop[dim]) for p in ordered}) > 1]
    dim = cut[0] if cut else 0
    if len(cut) > 1 or any(one.stop[dim] != other.start[dim] for one, other in pairwise(ordered)):
        return None
    return dim, tuple(part.shape[dim] for part in ordered)
