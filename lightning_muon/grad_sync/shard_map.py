"""Which part of each replicated parameter a rank updates: whole matrices for their owners, rows of everything else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from lightning_muon.comm.groups import AxisGroup, axis_group
from lightning_muon.params.boxes import Box
from lightning_muon.params.layout import AxisPlacement, OwnedBy, held_boxes
from lightning_muon.schedule.assign import longest_first


def place_shards(
    parameters: Sequence[Tensor], whole: Mapping[Tensor, int], num_ranks: int
) -> dict[Tensor, AxisPlacement]:
    """The placement of each parameter on an axis of ``num_ranks`` ranks; a pure function, equal on every rank.

    ``whole`` has the FLOPs of the parameters that one rank must own; owners are chosen so that ranks have equal FLOPs.
    The others are divided by rows, or updated by every rank where they have no dimensions or elements.
    """
    costs = [whole.get(parameter, 0) for parameter in parameters]
    sizes = [parameter.nbytes for parameter in parameters]
    taken = [index for index, parameter in enumerate(parameters) if parameter in whole]
    owners = longest_first(costs, sizes, [(0, 0)] * num_ranks, taken=taken)
    placements: dict[Tensor, AxisPlacement] = {}
    for index, parameter in enumerate(parameters):
        if parameter.ndim == 0 or parameter.numel() == 0:
            placements[parameter] = Replicate()
        else:
            placements[parameter] = OwnedBy(owners[index]) if index in owners else Shard(0)
    return placements


class ShardMap:
    """The parts of plain, contiguous parameters that the ranks of the shard axis hold; local.

    Every part is one range of rows. Replicas (the first axis of a 2-D mesh) hold the same parts.
    """

    def __init__(self, mesh: DeviceMesh, placements: Mapping[Tensor, AxisPlacement]) -> None:
        self.mesh = mesh
        self.shard: AxisGroup = axis_group(mesh, (mesh.ndim - 1,))
        self.replicate: AxisGroup | None = axis_group(mesh, (0,)) if mesh.ndim > 1 else None
        self._placements = dict(placements)
        # Parameter -> the part of each rank of the shard axis.
        self.boxes = {
            parameter: boxes_on_axis(tuple(parameter.shape), placement, self.shard.size)
            for parameter, placement in placements.items()
        }
        self._views: dict[Tensor, tuple[int, Tensor]] = {}

    def placements(self, parameter: Tensor) -> tuple[AxisPlacement, ...]:
        """One placement per axis of the mesh."""
        return (*(Replicate() for _ in range(self.mesh.ndim - 1)), self._placements[parameter])

    def is_sharded(self, parameter: Tensor) -> bool:
        """Whether each element is updated by one rank of the shard axis only."""
        return not isinstance(self._placements[parameter], Replicate)

    def local(self, parameter: Tensor, whole: Tensor | None = None) -> Tensor:
        """The calling rank's part of ``parameter``, or of ``whole``, a tensor like it. Shares memory."""
        if whole is not None:
            return self._part(parameter, whole)
        address, view = self._views.get(parameter, (0, parameter))
        if address != parameter.data_ptr():
            view = self._part(parameter, parameter)
            self._views[parameter] = parameter.data_ptr(), view
        return view

    def _part(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        box = self.boxes[parameter][self.shard.rank]
        return tensor.detach()[tuple(map(slice, box.start, box.stop))]


@lru_cache(maxsize=1 << 12)
def boxes_on_axis(shape: tuple[int, ...], placement: AxisPlacement, size: int) -> tuple[Box, ...]:
    """The part of each rank of an axis of ``size``, as a box."""
    return held_boxes(shape, (size,), (placement,), [(rank,) for rank in range(size)])


class BucketParts:
    """How the parts of some parameters are sent to and from the ranks that hold them; the same in every step."""

    def __init__(self, parameters: Sequence[Tensor], shard_map: ShardMap) -> None:
        # For each rank of the shard axis the indices, in what `cut` returns, of the parts that it holds.
        self.of_rank: list[list[int]] = [[] for _ in range(shard_map.shard.size)]
        self.sizes: list[int] = []  # Elements of each part that `cut` returns.
        self._splits: list[list[int]] = []
        for parameter in parameters:
            # Rows follow each other in the order of the ranks, or are one box that all ranks hold.
            boxes = shard_map.boxes[parameter]
            different = list(dict.fromkeys(box for box in boxes if box.numel))
            for rank, box in enumerate(boxes):
                if box.numel:
                    self.of_rank[rank].append(len(self.sizes) + different.index(box))
            self._splits.append([box.numel for box in different] or [0])
            self.sizes += self._splits[-1]
        # The part of each parameter that the calling rank holds.
        self.own = [shard_map.boxes[parameter][shard_map.shard.rank] for parameter in parameters]

    def cut(self, flattened: Iterable[Tensor]) -> list[Tensor]:
        """Views of the parts of all ranks in tensors like the parameters, in their order."""
        pieces: list[Tensor] = []
        for tensor, sizes in zip(flattened, self._splits, strict=True):
            pieces.extend(tensor.split(sizes) if len(sizes) > 1 else (tensor,))
        return pieces
