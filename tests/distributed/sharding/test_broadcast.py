"""Initial weights and buffers on several processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_muon.sharding.shard_model import shard_model
from tests.distributed.sharding.models import (
    full,
    make_mesh,
)
from tests.support.processes import ProcessPool


def _replicas_of_user_shards() -> Tensor:
    mesh = make_mesh((2, 2))
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    fully_shard(model[0], mesh=mesh)
    shard_model(model, mesh)
    return model[0].weight.to_local().clone()


def test_replicas_of_user_shards_become_equal(gloo: ProcessPool) -> None:
    shards = gloo.run(_replicas_of_user_shards, world_size=4)
    assert torch.equal(shards[0], shards[2])
    assert torch.equal(shards[1], shards[3])
    assert not torch.equal(shards[0], shards[1][: shards[0].shape[0]])


def _unusual() -> dict[str, Any]:
    mesh = make_mesh((1, 2))
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(5), nn.Flatten())
    model.register_buffer("phase", torch.rand(3).to(torch.complex64))
    model.register_buffer("mask", torch.rand(5) > 0.5)
    shard_model(model, mesh)
    return {name: full(tensor) for name, tensor in model.state_dict().items()}


def test_strided_weights_and_buffers_of_any_dtype_are_broadcast(gloo: ProcessPool) -> None:
    first, second = gloo.run(_unusual, world_size=2)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
