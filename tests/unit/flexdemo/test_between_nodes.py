"""What the ways of following other nodes have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_muon import FlexDeMoConfig
from lightning_muon.comm.groups import ALONE
from lightning_muon.flexdemo.inter_node_sync import BetweenNodes, OptimizerView
from lightning_muon.flexdemo.node_exchange import Nodes
from lightning_muon.flexdemo.node_state import NodeLayout
from lightning_muon.optim.matrix_step import Gradients
from tests.support.processes import ProcessPool


def _view(mesh: Any = None) -> OptimizerView:
    return OptimizerView(FlexDeMoConfig(), mesh, dict, list, dict)


class _Least(BetweenNodes):
    """Only what every way must have."""

    @property
    def state_keys(self) -> frozenset[str]:
        return frozenset()

    def init_state(self, parameter: Tensor) -> None:
        raise AssertionError

    def updates(self, gradients: Gradients, sent_early: frozenset[str]) -> Gradients:
        return gradients

    def load(self, parameter: Tensor, saved: Mapping[str, Any]) -> None:
        raise AssertionError

    def sent_bytes(self) -> int:
        return 0


def test_a_process_without_a_mesh_is_the_only_node() -> None:
    view = _view()
    assert view.layout is None
    assert (view.node, view.num_nodes) == (0, 1)
    assert (view.nodes.there, view.nodes.back) == (ALONE, ALONE)
    assert view.nodes is view.nodes, "exchanges that wait would be lost"
    local = torch.zeros(3, 2)
    of_all = view.of_all_nodes(nn.Parameter(local), local)
    assert of_all.shape == (1, 3, 2)
    of_all.fill_(1)
    assert (local == 1).all()


def test_most_ways_need_to_do_nothing_beside_their_updates() -> None:
    way = _Least(_view())
    parameter = nn.Parameter(torch.ones(2))
    assert way.is_current()
    assert way.plan({}, 3) is None
    assert list(way.order) == []
    assert way.saved(parameter) == {}
    assert way.common([parameter]) == [parameter]
    assert way.per_node == {}
    assert way.own_state == frozenset()
    way.finish(1)
    way.finish_in_flight()
    with way.common_weights():
        assert (parameter == 1).all()


def test_a_way_must_say_what_it_does() -> None:
    with pytest.raises(TypeError, match="abstract"):
        BetweenNodes(_view())  # type: ignore[abstract]


def _on_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    view = _view(mesh)
    assert isinstance(view.layout, NodeLayout)
    assert view.layout is view.layout
    rank = torch.distributed.get_rank()
    assert (view.node, view.num_nodes) == (rank // 2, 2)
    nodes: Nodes = view.nodes
    members = [torch.distributed.get_process_group_ranks(leg.group) for leg in (nodes.there, nodes.back)]
    assert members == [[rank % 2, rank % 2 + 2]] * 2
    assert nodes.there.group is not nodes.back.group, "sums would be mixed up with what is sent first"
    assert mesh.get_group("replicate") not in (nodes.there.group, nodes.back.group)
    found = view.of_all_nodes(nn.Parameter(torch.zeros(3), requires_grad=False), torch.full((3,), float(view.node)))
    assert torch.equal(found.full_tensor(), torch.tensor([[0.0] * 3, [1.0] * 3]))  # type: ignore[attr-defined]


def test_the_nodes_are_the_ranks_that_hold_the_same_shards(gloo: ProcessPool) -> None:
    gloo.run(_on_a_mesh, world_size=4)
