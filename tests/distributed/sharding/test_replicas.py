"""Models of plain tensors become equal on all ranks, or fail alike."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_muon.sharding.weights import names_of, replicate_model
from tests.distributed.sharding.training import mesh_of
from tests.support.processes import ProcessPool


def _replicated() -> dict[str, Tensor]:
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last), nn.BatchNorm2d(3))
    net[1].running_mean.normal_()
    replicate_model(net, mesh_of((1, dist.get_world_size())), "ddp")
    assert all(parameter.is_contiguous() for parameter in net.parameters())
    return {name: value.clone() for name, value in net.state_dict().items()}


def test_weights_and_buffers_are_those_of_the_first_rank(gloo: ProcessPool) -> None:
    first, *others = gloo.run(_replicated, world_size=3)
    torch.manual_seed(0)
    assert torch.equal(first["0.weight"], nn.Conv2d(2, 3, 2).weight)
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


def _sharded_already() -> None:
    mesh = mesh_of((dist.get_world_size(),))
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(net[1], mesh=mesh)
    replicate_model(net, mesh, "ddp")


def test_weights_that_are_shards_already_are_an_error(gloo: ProcessPool) -> None:
    gloo.expect_error_on_all_ranks(_sharded_already, world_size=2, match=r"1\.weight \(4, 4\) is a DTensor already")


def _different() -> None:
    net = nn.Linear(4, 4 + dist.get_rank())
    replicate_model(net, mesh_of((dist.get_world_size(),)), "ddp")


def test_different_models_are_the_same_error_everywhere(gloo: ProcessPool) -> None:
    gloo.expect_error_on_all_ranks(_different, world_size=2, exception=RuntimeError, match="the model Linear")


def _on_meta() -> None:
    with torch.device("meta"):
        net = nn.Linear(2, 2)
    replicate_model(net, mesh_of((dist.get_world_size(),)), "ddp")


def test_weights_without_memory_are_an_error(gloo: ProcessPool) -> None:
    gloo.expect_error_on_all_ranks(_on_meta, world_size=2, match=r"weight \(2, 2\) is on the meta device")


def test_a_tied_parameter_has_one_name() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    assert list(names_of(net)) == ["0.weight", "0.bias", "1.bias"]
