"""The matrices that Newton-Schulz sees in a parameter, and where they lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, product

from torch import Tensor

from lightning_muon.params.boxes import Box, Held, ShardBoxes, cut_of
from lightning_muon.params.layout import RoutedParameter
from lightning_muon.params.routing import Route


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
    # The ranks that orthogonalize it, ascending: one, or all with `assignment="redundant"`. The planner sets them.
    owners: tuple[int, ...] = ()

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
