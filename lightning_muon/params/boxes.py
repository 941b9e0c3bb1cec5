"""Boxes of a tensor: those that ranks hold, and what they hold of others."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, combinations, pairwise

Held = Mapping[int, Mapping[int, int]]
"""Replica -> its ranks with elements of a matrix -> how many."""


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
