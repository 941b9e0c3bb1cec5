"""Sums of a bucket to owners: their order and rounding."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from lightning_muon.sharding.shards import ShardMap, place_shards
from lightning_muon.sharding.zero2 import Bucket
from tests.distributed.sharding.training import mesh_of
from tests.support.processes import ProcessPool

# The first two matrices have an owner; the others are divided by rows, some of fewer rows than ranks.
SHAPES = [(13, 7), (7, 13), (5,), (), (2, 3, 2), (0, 3), (1, 9)]
NUM_OWNED = 2


def _gradients(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def _reduce(dtype: torch.dtype) -> Tensor:
    """Two buckets, read after both; returns what this rank holds of the parameter that all of them hold."""
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    owned = dict.fromkeys(parameters[:NUM_OWNED], 10)
    shard_map = ShardMap(mesh_of((dist.get_world_size(),)), place_shards(parameters, owned, dist.get_world_size()))
    own = [gradient.to(dtype) for gradient in _gradients(dist.get_rank())]
    buckets = [Bucket(tuple(some), shard_map) for some in (parameters[:3], parameters[3:])]
    buckets[0].reduce(own[:3])
    buckets[1].reduce(own[3:])
    found = [reduced for bucket in buckets if bucket.advance(wait=True) for reduced in bucket.gradients(4.0)]
    for index, (parameter, reduced) in enumerate(zip(parameters, found, strict=True)):
        total = sum(_gradients(rank)[index].to(dtype).float() for rank in range(dist.get_world_size()))
        assert torch.equal(reduced, shard_map.local(parameter, total / 4.0))  # type: ignore[operator]
    return found[3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sums_are_made_in_the_order_of_the_ranks_in_32_bits(gloo: ProcessPool, dtype: torch.dtype) -> None:
    first, *others = gloo.run(_reduce, dtype, world_size=3)
    assert all(torch.equal(first, other) for other in others)


def _overflow() -> Tensor:
    """The sum of a replica, 2 x 40000, is no float16; its mean with minus as much of the other one is."""
    parameter = nn.Parameter(torch.zeros(8, dtype=torch.float16))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    bucket = Bucket((parameter,), ShardMap(mesh, {parameter: Shard(0)}))
    sign = 1 if dist.get_rank() < 2 else -1
    bucket.reduce([torch.full((8,), sign * 40000.0, dtype=torch.float16)])
    assert bucket.advance(wait=True)
    (reduced,) = bucket.gradients(4.0)
    return reduced


def test_a_float16_sum_of_a_replica_does_not_overflow_on_its_way(gloo: ProcessPool) -> None:
    for reduced in gloo.run(_overflow):
        assert torch.equal(reduced, torch.zeros(4))
