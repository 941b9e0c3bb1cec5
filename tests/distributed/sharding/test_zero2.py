"""Sums of a bucket to owners, their order and rounding; optimizer state that one rank saves or loads wrongly."""

from collections.abc import Mapping, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_muon.params.layout import PlacedState
from lightning_muon.sharding.mains import MainWeights
from lightning_muon.sharding.zero2 import Bucket, ShardMap, Zero2Layout, place_shards
from tests.distributed.sharding.training import mesh_of
from tests.support.processes import ProcessPool

# The first two matrices have an owner; the others are divided by rows, some of fewer rows than ranks.
SHAPES = [(13, 7), (7, 13), (5,), (), (2, 3, 2), (0, 3), (1, 9)]
NUM_OWNED = 2


def _shard_map(parameters: Sequence[Tensor], whole: Mapping[Tensor, int], mesh_shape: tuple[int, ...]) -> ShardMap:
    """Those of ``whole`` have one owner each on the last axis of a mesh of all ranks."""
    return ShardMap(mesh_of(mesh_shape), place_shards(parameters, whole, mesh_shape[-1]))


def _gradients(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def _setup(mesh_shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[list[nn.Parameter], ShardMap]:
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    return parameters, _shard_map(parameters, dict.fromkeys(parameters[:NUM_OWNED], 10), mesh_shape)


def _reduce(dtype: torch.dtype) -> Tensor:
    """Two buckets, read after both; returns what this rank holds of the parameter that all of them hold."""
    parameters, shard_map = _setup((dist.get_world_size(),), dtype)
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


STATE_SHAPES = [(13, 7), (2, 5), (), (5,), (4, 3, 2, 2), (0, 4), (1, 9), (3, 0), (8, 8), (17, 3)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int32]


def _shards_of(mesh_shape: tuple[int, ...]) -> tuple[list[Tensor], ShardMap]:
    """Parameters of all shapes; those of several dimensions and one vector are owned whole."""
    parameters = [torch.empty(shape) for shape in STATE_SHAPES]
    whole = {parameter: max(parameter.numel(), 1) for parameter in parameters if parameter.ndim != 0}
    return parameters, _shard_map(parameters, whole, mesh_shape)


def _state(parameters: list[Tensor], shard_map: ShardMap) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Two states for each parameter in a mix of dtypes: parameters, whole values, and the parts of this rank."""
    generator = torch.Generator().manual_seed(3)
    doubled = [parameter for parameter in parameters for _ in range(2)]
    full = [
        (torch.randn(parameter.shape, generator=generator) * 1000).to(DTYPES[index % 4])
        for index, parameter in enumerate(doubled)
    ]
    local = [shard_map.local(parameter, whole).clone() for parameter, whole in zip(doubled, full, strict=True)]
    return doubled, full, local


def _placed(parameters: Sequence[Tensor], states: Sequence[Tensor]) -> list[PlacedState]:
    pairs = zip(parameters, states, strict=True)
    return [PlacedState(parameter, state, tuple(parameter.shape)) for parameter, state in pairs]


def _wrong_on_one_rank(kind: str) -> None:
    parameters, shard_map = _shards_of((dist.get_world_size(),))
    doubled, full, local = _state(parameters, shard_map)
    layout = Zero2Layout(shard_map, [], {}, MainWeights(nn.Module(), shard_map.mesh))
    is_wrong = dist.get_rank() == 1
    if is_wrong and kind == "dtype":
        local[0] = local[0].double()
    rows = layout.saved(_placed(doubled, local))
    if is_wrong and kind == "plain":
        rows[0] = full[0]
    if is_wrong and kind == "replicated":
        rows[0] = DTensor.from_local(full[0], shard_map.mesh, [Replicate()], run_check=False)
    layout.loaded(_placed(doubled, rows))


@pytest.mark.parametrize(
    ("kind", "match"),
    [("dtype", "tensor 0.*float64"), ("plain", "tensor 0"), ("replicated", r"\(13, 7\) is laid out as .*Replicate")],
)
def test_what_one_rank_does_wrong_stops_all_ranks(gloo: ProcessPool, kind: str, match: str) -> None:
    with pytest.raises(Exception, match=match) as failed:
        gloo.run(_wrong_on_one_rank, kind, world_size=3, grace=20.0)
    assert sorted(failed.value.failures) == [0, 1, 2]  # type: ignore[attr-defined]
