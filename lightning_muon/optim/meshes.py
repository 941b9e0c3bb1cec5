"""The meshes on which the parameters of an optimizer live, and agreement over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.comm.agreement import fail_together
from lightning_muon.comm.groups import ALONE, AxisGroup, axis_group, host_group
from lightning_muon.params.layout import Layout


@dataclass(frozen=True, eq=False)
class MeshMembers:
    """Parameters that live on one mesh (``None``: local tensors).

    Attributes:
        mesh: The mesh.
        axes: The group over all axes of it.
        host: The same ranks, for tensors in the memory of the host, so that asking does not wait for a device.
        tensors: The parameters.
    """

    mesh: DeviceMesh | None
    axes: AxisGroup
    host: AxisGroup
    tensors: tuple[Tensor, ...]


def group_by_mesh(tensors: Sequence[Tensor], layout: Layout) -> tuple[MeshMembers, ...]:
    """Parameters by mesh, the smallest meshes first, so that what one mesh finds out reaches the larger ones.

    Collective over meshes of several axes the first time; every rank of them must call it.

    Args:
        tensors: Parameters; they need not be known otherwise.
        layout: Where they lie.
    """
    found: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(layout.mesh_and_placements(tensor)[0], []).append(tensor)
    groups: list[MeshMembers] = []
    for home, members in found.items():
        axes = ALONE if home is None else axis_group(home, tuple(range(home.ndim)))
        host = axes if home is None or home.device_type == "cpu" else host_group(axes)
        groups.append(MeshMembers(home, axes, host, tuple(members)))
    return tuple(sorted(groups, key=lambda group: group.axes.size))


def fail_on_all_meshes(error: Exception | None, meshes: Sequence[MeshMembers]) -> None:
    """Raise on every rank of every mesh that shares a rank with one where there is an ``error``.

    Collective over ``meshes``; every rank of them must call it.
    """
    for members in meshes:
        if members.axes.group is None:
            continue
        try:
            fail_together(error, members.axes.group)
        except Exception as problem:
            error = error or problem
    if error is not None:
        raise error
