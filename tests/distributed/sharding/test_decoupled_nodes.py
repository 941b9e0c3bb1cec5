"""FSDP2 inside of nodes that know nothing of each other: optimizers that are refused, units that differ."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from lightning_muon import ParallelMuon
from lightning_muon.sharding.base import ModeOptions
from lightning_muon.sharding.modes import make_mode
from tests.distributed.sharding.training import mesh_of
from tests.support.processes import ProcessPool


class _Nodes(torch.optim.SGD):
    """Stands for an optimizer that exchanges updates between nodes."""

    mesh: DeviceMesh | None = None

    def use_mesh(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh


def _attach(optimizer: str, sharding: str = "fsdp", *, decoupled: bool = True, is_sharded: bool = False) -> None:
    net, mesh = nn.Sequential(nn.Linear(4, 4)), mesh_of((2, 1))
    if is_sharded:
        fully_shard(net[0], mesh=mesh)
    mode = make_mode(sharding, mesh, ModeOptions(decoupled_nodes=decoupled))
    mode.prepare(net)
    kind = {"sgd": torch.optim.SGD, "muon": ParallelMuon, "nodes": _Nodes}[optimizer]
    mode.attach(net, [kind(net.parameters(), lr=0.1)])


@pytest.mark.parametrize(
    ("optimizer", "options", "match"),
    [
        ("sgd", {}, "drift apart; use FlexDeMo"),
        ("muon", {}, "drift apart; use FlexDeMo"),
        ("nodes", {"decoupled": False}, r"ModeOptions\(decoupled_nodes=True\)"),
        ("nodes", {"decoupled": False, "sharding": "ddp"}, r"ModeOptions\(decoupled_nodes=True\)"),
        ("nodes", {"is_sharded": True}, r"0\.weight is a DTensor on .*'shard'\]"),
    ],
)
def test_gradients_and_weights_of_other_nodes_are_an_error(
    gloo: ProcessPool, optimizer: str, options: dict[str, Any], match: str
) -> None:
    gloo.expect_error_on_all_ranks(_attach, optimizer, **options, world_size=2, match=match)


def _one_node_alone(shape: tuple[int, int]) -> bool:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mode = make_mode("fsdp", mesh_of(shape), ModeOptions(decoupled_nodes=True, wrap_policy=(nn.Linear,)))
    mode.prepare(net)
    mode.attach(net, [_Nodes(net.parameters(), lr=0.1)])
    node = dist.get_rank() // shape[1]
    x = torch.ones(2, 4)
    (net(x) if node == 0 else net[0](x)).sum().backward()
    mode.finish_gradients()
    mode.close()
    return net[1].weight.grad is not None


def test_nodes_may_run_different_units(gloo: ProcessPool) -> None:
    assert gloo.run(_one_node_alone, (2, 2)) == [True, True, False, False]
