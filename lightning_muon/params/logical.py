"""Boxes of a parameter, and the matrices that Newton-Schulz sees in it."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, combinations, pairwise, product

from lightning_muon.params.routing import Route


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor: ``start[d] <= index < stop[d]`` in every dimension."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Size in every dimension."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box:
        """Common part; an empty one has ``numel == 0``."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(max, start, map(min, self.stop, other.stop)))
        return Box(start, stop)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of this box in the whole tensor."""
        return tuple(map(slice, self.start, self.stop))

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Index of this box in a tensor that holds just ``outer``."""
        return tuple(
            slice(start - origin, stop - origin)
            for start, stop, origin in zip(self.start, self.stop, outer.start, strict=True)
        )


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


class ShardBoxes:
    """The boxes of one tensor, of at least one dimension, on the ranks of a group; they may be empty or overlap."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self.boxes = tuple(boxes)
        filled = [(rank, box) for rank, box in enumerate(boxes) if box.numel]
        # Along the dimension with most cuts, so that few boxes have to be looked at.
        extents = [{(box.start[dim], box.stop[dim]) for _, box in filled} for dim in range(len(boxes[0].start))]
        self._dim = max(range(len(extents)), key=lambda dim: len(extents[dim]))
        self._uncut = {dim: next(iter(found)) for dim, found in enumerate(extents) if len(found) == 1}
        self._filled = sorted(filled, key=lambda item: item[1].start[self._dim])
        self._starts = [box.start[self._dim] for _, box in self._filled]
        # The largest stop of each box and all before it.
        self._last_stops = list(accumulate((box.stop[self._dim] for _, box in self._filled), max))

    def pattern(self, box: Box) -> tuple[object, ...]:
        """Key that is equal for boxes that lie alike on the ranks, such as experts of a stack that is cut by rows."""
        places: list[object] = []
        for dim, (start, stop) in enumerate(zip(box.start, box.stop, strict=True)):
            first, last = self._uncut.get(dim, (stop, start))
            places.append(stop - start if first <= start and stop <= last else (start, stop))
        return tuple(places)

    def pieces(self, box: Box) -> dict[int, Box]:
        """Rank -> its part of ``box``, by rank; ranks without elements of it are left out."""
        first = bisect_right(self._last_stops, box.start[self._dim])
        stop = bisect_left(self._starts, box.stop[self._dim])
        found = {rank: held.intersect(box) for rank, held in self._filled[first:stop]}
        return {rank: found[rank] for rank in sorted(found) if found[rank].numel}


@dataclass(frozen=True)
class LogicalMatrix:
    """One matrix for Newton-Schulz: a box of a parameter, read as ``rows x cols`` in row-major order."""

    name: str
    box: Box
    rows: int
    cols: int
    is_transposed: bool = False  # Whether the columns are the outputs of the layer.
    neuron_dims: tuple[int, ...] = (0,)  # `neuron_dims` of its parameter.
    part: tuple[int, int] = (0, 0)  # Dimension along which its parameter is fused, and number of the part.

    @property
    def num_neurons(self) -> int:
        """Number of outputs of the layer that the matrix has."""
        return self.cols if self.is_transposed else self.rows

    @property
    def neuron_box(self) -> Box:
        """The values of its neurons in a tensor of :func:`neuron_shape`."""
        split_dim, part = self.part
        start, stop = list(self.box.start), list(self.box.stop)
        for dim in range(len(start)):
            if dim not in self.neuron_dims:
                start[dim] = part if dim == split_dim else 0
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


def logical_matrices(shape: tuple[int, ...], route: Route) -> tuple[LogicalMatrix, ...]:
    """The matrices of a parameter of global ``shape``: its fused parts, or one for each index of a stack."""
    if route.kind == "elementwise" or 0 in shape:
        return ()
    if route.kind == "stack":
        *leading, rows, cols = shape
        return tuple(
            LogicalMatrix(
                f"{route.name}{list(index)}",
                Box((*index, 0, 0), (*(i + 1 for i in index), rows, cols)),
                rows,
                cols,
                route.is_transposed,
                neuron_dims=neuron_dims(shape, route),
            )
            for index in product(*map(range, leading))
        )
    dim, sizes = route.split_dim, route.splits or (shape[route.split_dim],)
    parts: list[LogicalMatrix] = []
    for index, (start, stop) in enumerate(pairwise(accumulate(sizes, initial=0))):
        box = Box((0,) * dim + (start,) + (0,) * (len(shape) - dim - 1), (*shape[:dim], stop, *shape[dim + 1 :]))
        name = f"{route.name}[{index}]" if len(sizes) > 1 else route.name
        rows, cols = box.shape[0], box.numel // box.shape[0]
        kept = neuron_dims(shape, route)
        parts.append(LogicalMatrix(name, box, rows, cols, route.is_transposed, neuron_dims=kept, part=(dim, index)))
    return tuple(parts)
