"""FSDP2 inside of nodes that know nothing of each other: weights, gradients, norms and divisors."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_muon import ParallelMuon
from lightning_muon.sharding.base import ModeOptions
from lightning_muon.sharding.modes import make_mode
from tests.distributed.sharding.models import full, gradients_of
from tests.distributed.sharding.training import mesh_of
from tests.support.processes import ProcessPool


class _Nodes(torch.optim.SGD):
    """Stands for an optimizer that exchanges updates between nodes."""

    mesh: DeviceMesh | None = None

    def use_mesh(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh


def _net(seed: int = 5) -> nn.Sequential:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(13, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    net.register_parameter("scale", nn.Parameter(torch.rand(())))
    return net


def _batch(rank: int) -> Tensor:
    return torch.randn(4, 13, generator=torch.Generator().manual_seed(100 + rank))


def _loss(net: nn.Module, rank: int) -> Tensor:
    return (rank + 1) * (net(_batch(rank)) * net.scale).square().sum()


def _train(
    shape: tuple[int, int], divisor: float | None, max_norm: float | None, is_sharded: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor], float | None]:
    """Initial weights and buffers, which every rank has made differently; gradients; their norm."""
    mesh = mesh_of(shape)
    net = _net(seed=dist.get_rank())
    net[1].running_mean.fill_(dist.get_rank() + 1.0)
    if is_sharded:
        fully_shard(net[0], mesh=mesh["shard"])
    mode = make_mode("fsdp", mesh, ModeOptions(decoupled_nodes=True))
    mode.prepare(net)
    state = {name: full(tensor).detach().clone() for name, tensor in net.state_dict().items()}
    optimizer = _Nodes(net.parameters(), lr=0.1)
    mode.attach(net, [optimizer])
    mode.set_gradient_divisor(divisor)
    with mode.no_sync():
        _loss(net, dist.get_rank()).backward()
    _loss(net, dist.get_rank()).backward()
    mode.finish_gradients()
    norm = None if max_norm is None else float(mode.clip_grad_norm_(optimizer, max_norm))
    meshes = {p.device_mesh for p in net.parameters() if isinstance(p, DTensor)}
    assert meshes == {mesh["shard"]} and optimizer.mesh is mesh
    mode.close()
    return state, {name: full(g).clone() for name, g in gradients_of(net).items() if g is not None}, norm


def _expected(state: dict[str, Tensor], shape: tuple[int, int], divisor: float | None) -> list[dict[str, Tensor]]:
    """For each node twice (two micro-batches) the sum over its ranks, divided."""
    num_nodes, num_shards = shape
    nodes = []
    for node in range(num_nodes):
        net = _net()
        net.load_state_dict(state)
        for rank in range(node * num_shards, (node + 1) * num_shards):
            (2 * _loss(net, rank) / (num_shards if divisor is None else divisor / num_nodes)).backward()
        nodes.append({name: p.grad for name, p in net.named_parameters() if p.grad is not None})
    return nodes


@pytest.mark.parametrize(
    ("shape", "divisor", "max_norm", "is_sharded"),
    [
        ((2, 2), 5.0, None, False),
        ((3, 1), 7.0, None, False),
        ((1, 3), None, None, False),
        ((2, 2), None, 0.3, True),
        ((3, 1), None, 0.3, False),
        ((2, 2), None, 1e9, False),
    ],
)
def test_nodes_start_equal_and_have_gradients_of_their_own(
    gloo: ProcessPool, shape: tuple[int, int], divisor: float | None, max_norm: float | None, is_sharded: bool
) -> None:
    """Their mean is the gradient of all; they are clipped by one norm."""
    results = gloo.run(_train, shape, divisor, max_norm, is_sharded, world_size=math.prod(shape))
    state = results[0][0]
    first = _net(seed=0)
    first[1].running_mean.fill_(1.0)
    for name, tensor in first.state_dict().items():
        # A user's own sharding takes the part of each rank, which the first rank of each part has.
        if not (is_sharded and name.startswith("0.")):
            assert torch.equal(state[name], tensor)
    expected = _expected(state, shape, divisor)
    norm = math.sqrt(sum(float(g.double().square().sum()) for node in expected for g in node.values()) / shape[0])
    scale = 1.0 if max_norm is None else min(1.0, max_norm / norm)
    rtol, atol = (1e-5, 1e-5) if max_norm is None else (1e-4, 1e-6 * norm * scale)
    assert max_norm is None or results[0][2] == pytest.approx(norm, rel=1e-5)
    for rank, (own_state, found, found_norm) in enumerate(results):
        assert all(torch.equal(own_state[name], state[name]) for name in state)
        assert found_norm == results[0][2]
        node = expected[rank // shape[1]]
        assert found.keys() == node.keys()
        for name, gradient in node.items():
            torch.testing.assert_close(found[name], scale * gradient, rtol=rtol, atol=atol)


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
