"""Where matrices are exchanged: which ranks, in which replicas, and how busy these ranks already are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.comm.mesh import ALONE, AxisGroup, axis_group
from lightning_muon.schedule.muon import MatrixSpec, MuonPlan


@dataclass(frozen=True, eq=False)
class ExchangeHome:
    """The ranks among which some matrices travel.

    Attributes:
        mesh: Mesh of the parameters, ``None`` for local tensors.
        mesh_axes: Axes of ``mesh`` over which matrices travel.
        sharded: Those of them that divide matrices; the others replicate them.
        axes: The ranks that differ from this one along these axes.
        replica_of: Replica of each of these ranks, numbered from 0.
    """

    mesh: DeviceMesh | None
    mesh_axes: tuple[int, ...]
    sharded: tuple[int, ...]
    axes: AxisGroup
    replica_of: tuple[int, ...]

    @property
    def spans_replicas(self) -> bool:
        """Whether one owner serves several replicas."""
        return len(set(self.replica_of)) > 1


class ExchangeHomes:
    """Makes each home once."""

    def __init__(self) -> None:
        self._found: dict[tuple[DeviceMesh | None, tuple[int, ...], bool], ExchangeHome] = {}

    def get(self, mesh: DeviceMesh | None, sharded: tuple[int, ...], *, is_shared: bool) -> ExchangeHome:
        """The home of matrices that are sharded over the axes ``sharded`` of ``mesh`` and replicated over the others.

        Collective over the ranks of the home the first time; every one of them must call it.

        Args:
            mesh: Of the parameter.
            sharded: Indices of axes of more than one rank.
            is_shared: One owner for all replicas, on any rank of the mesh; otherwise one in each replica.
        """
        key = mesh, sharded, is_shared
        if key not in self._found:
            self._found[key] = self._make(mesh, sharded, is_shared=is_shared)
        return self._found[key]

    def _make(self, mesh: DeviceMesh | None, sharded: tuple[int, ...], *, is_shared: bool) -> ExchangeHome:
        mesh_axes = tuple(range(mesh.ndim)) if mesh is not None and is_shared else sharded
        axes = ALONE if mesh is None else axis_group(mesh, mesh_axes)
        replicas: dict[tuple[int, ...], int] = {}
        replica_of = tuple(
            replicas.setdefault(
                tuple(place for axis, place in enumerate(coordinate) if axis not in sharded), len(replicas)
            )
            for coordinate in axes.coordinates
        )
        return ExchangeHome(mesh, mesh_axes, sharded, axes, replica_of)


class Loads:
    """FLOPs and bytes that each rank of a mesh owns so far, so that later matrices even out earlier ones."""

    def __init__(self) -> None:
        self._owned: list[tuple[ExchangeHome, dict[tuple[int, ...], tuple[int, int]]]] = []

    def of(self, home: ExchangeHome) -> list[tuple[int, int]]:
        """``(FLOPs, bytes)`` of every rank of ``home``; the same in each of its replicas.

        Replicas that repeat the work must have the same owners, and so the same batches: on CUDA a matrix in a batch
        may get other bits than alone. Where their loads differ the largest one counts.
        """
        return [
            (sum(flops for flops, _ in found), sum(size for _, size in found))
            for found in (self._at(home, coordinate) for coordinate in home.axes.coordinates)
        ]

    def add(self, home: ExchangeHome, specs: Sequence[MatrixSpec], plan: MuonPlan, itemsize: int) -> None:
        """Count the matrices of ``home``; where it is one replica of several, the others do the same."""
        loads = [(0, 0)] * home.axes.size
        for spec, owners in zip(specs, plan.owners, strict=True):
            for owner in owners:
                flops, size = loads[owner]
                loads[owner] = (flops + spec.flops, size + spec.numel * itemsize)
        places = [_project(coordinate, home.mesh_axes) for coordinate in home.axes.coordinates]
        self._owned.append((home, dict(zip(places, loads, strict=True))))

    def _at(self, home: ExchangeHome, coordinate: tuple[int, ...]) -> list[tuple[int, int]]:
        """The load of each earlier home at this place of ``home``."""
        return [
            max(
                load
                for place, load in loads.items()
                if all(
                    coordinate[axis] == index
                    for axis, index in zip(earlier.mesh_axes, place, strict=True)
                    if axis in home.mesh_axes
                )
            )
            for earlier, loads in self._owned
            if earlier.mesh == home.mesh
        ]


def _project(coordinate: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(coordinate[axis] for axis in axes)
