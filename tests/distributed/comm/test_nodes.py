"""Ranks learn which of them share a node, and get groups inside and across the nodes."""

from __future__ import annotations

import os
from unittest import mock

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lightning_muon.comm.groups import ALONE, axis_group, make_hops, nodes_of
from tests.support.processes import ProcessPool


def _nodes() -> tuple[list[int], list[int]]:
    group = axis_group(init_device_mesh("cpu", (4,)), (0,))
    with mock.patch("socket.gethostname", return_value=f"host{dist.get_rank() % 2}"):
        by_name = nodes_of(group)
    with mock.patch.dict(os.environ, GROUP_RANK=str(dist.get_rank() // 2)):
        return by_name, nodes_of(group)


def test_host_names_and_the_agents_of_torchrun_tell_nodes_apart_on_all_ranks(gloo: ProcessPool) -> None:
    assert gloo.run(_nodes) == [([0, 1, 0, 1], [0, 0, 2, 2])] * 4
    assert nodes_of(ALONE) == [0]


def _hops() -> list[tuple[list[int], tuple[tuple[int, ...], ...]]]:
    group = axis_group(init_device_mesh("cpu", (4,)), (0,))
    hops = make_hops(group, [[0, 2], [1, 3]])
    again = make_hops(group, [[0, 2], [1, 3]])
    assert all(one.group.group is not other.group.group for one, other in zip(hops, again, strict=True))
    assert all(hop.group.group is not None and hop.group.rank == hop.group.group.rank() for hop in hops)
    return [(dist.get_process_group_ranks(hop.group.group), hop.parts) for hop in hops]


def test_a_rank_adds_up_inside_its_node_what_the_ranks_of_its_place_hold_and_then_its_own(gloo: ProcessPool) -> None:
    first, second, *_ = gloo.run(_hops)
    # What stays on the node comes last.
    assert first == [([0, 2], ((1, 0), (3, 2))), ([0, 1], ((0,), (1,)))]
    assert second == [([1, 3], ((0, 1), (2, 3))), ([0, 1], ((0,), (1,)))]
