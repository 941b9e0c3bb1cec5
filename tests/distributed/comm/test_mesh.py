"""Process groups over axes of a mesh."""

from __future__ import annotations

import datetime
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_muon.comm.groups import PrivateGroups, axis_group
from tests.support.processes import ProcessPool


def _sum_over(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, int, tuple[tuple[int, ...], ...]]:
    mesh = init_device_mesh("cpu", shape)
    found = axis_group(mesh, axes)
    total = torch.tensor(dist.get_rank())
    if found.group is not None:
        dist.all_reduce(total, group=found.group)
    assert found.coordinates[found.rank] == tuple(mesh.get_coordinate())  # type: ignore[arg-type]
    return int(total), found.size, found.coordinates


@pytest.mark.parametrize(
    ("axes", "sums"), [((0,), [2, 4, 2, 4]), ((1,), [1, 1, 5, 5]), ((0, 1), [6] * 4)], ids=["rows", "columns", "all"]
)
def test_a_group_spans_its_axes_only(gloo: ProcessPool, axes: tuple[int, ...], sums: list[int]) -> None:
    assert [total for total, _, _ in gloo.run(_sum_over, (2, 2), axes)] == sums


def test_an_axis_of_one_rank_needs_no_group(gloo: ProcessPool) -> None:
    results = gloo.run(_sum_over, (2, 1), (1,), world_size=2)
    assert [(total, size) for total, size, _ in results] == [(0, 1), (1, 1)]


def _seconds_until_a_collective_gives_up() -> float:
    torch.distributed.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=3))
    (group,) = PrivateGroups().of([axis_group(init_device_mesh("cpu", (2,)), (0,))])
    begin = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            dist.all_reduce(torch.ones(1), group=group.group)
    return time.monotonic() - begin


def test_own_groups_wait_no_longer_than_the_default_group(gloo: ProcessPool) -> None:
    assert gloo.run_fresh(_seconds_until_a_collective_gives_up, world_size=2)[0] < 30.0


def _sum_over_half() -> int:
    """A mesh that is only a part of the world, in another order than the ranks."""
    even, odd = (DeviceMesh("cpu", [[last], [first]]) for first, last in ((0, 2), (1, 3)))
    other = even if dist.get_rank() in (0, 2) else odd
    found = axis_group(other, (0, 1))
    values = [torch.zeros(1, dtype=torch.long) for _ in range(2)]
    dist.all_gather(values, torch.tensor([dist.get_rank()]), group=found.group)
    assert [int(other.mesh[coordinate]) for coordinate in found.coordinates] == [int(value) for value in values]
    return int(sum(values))


def test_a_mesh_on_a_part_of_the_world_has_its_own_group(gloo: ProcessPool) -> None:
    assert gloo.run(_sum_over_half) == [2, 4, 2, 4]


def _private_groups() -> tuple[bool, bool, bool]:
    axes = axis_group(init_device_mesh("cpu", (dist.get_world_size(),)), (0,))
    mine, others = PrivateGroups(), PrivateGroups()
    first, second = mine.of([axes, axes])
    (other,) = others.of([axes])
    again, _ = mine.of([axes, axes])
    groups = [axes.group, first.group, second.group, other.group]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    return len(set(groups)) == 4, again.group is first.group, first.coordinates == axes.coordinates


def test_every_optimizer_has_groups_of_its_own_and_keeps_them(gloo: ProcessPool) -> None:
    assert gloo.run(_private_groups, world_size=2) == [(True, True, True)] * 2
