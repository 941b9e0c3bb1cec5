"""New values enter a node once and reach all of its ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_muon.comm.groups import make_hops
from lightning_muon.grad_sync.parameter_all_gather import ParameterAllGather, units_of
from lightning_muon.grad_sync.shard_map import ShardMap, place_shards
from tests.support.processes import ProcessPool

# The first two matrices have an owner; the others are divided by rows, some of fewer rows than ranks.
SHAPES = [(13, 7), (40, 9), (2, 5), (), (5,), (4, 3, 2, 2), (0, 4), (1,)]
Setup = tuple[list[nn.Parameter], ShardMap, ParameterAllGather]


def _setup(num_in_bucket: int, grid: list[list[int]]) -> Setup:
    generator = torch.Generator().manual_seed(7)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    model = nn.ParameterList(parameters)
    shard_map = ShardMap(init_device_mesh("cpu", (4,)), place_shards(parameters, dict.fromkeys(parameters[:2], 10), 4))
    buckets = [parameters[start : start + num_in_bucket] for start in range(0, len(parameters), num_in_bucket)]
    hops = make_hops(shard_map.shard, grid)
    return parameters, shard_map, ParameterAllGather(shard_map, buckets, hops, units_of(model, []))


def _step(setup: Setup, seed: int, *, skip: int | None = None) -> list[Tensor]:
    """Each rank updates its parts in an order of its own; returns the values that all of them shall have."""
    parameters, shard_map, returns = setup
    generator = torch.Generator().manual_seed(seed)
    expected = [parameter.detach() + torch.randn(parameter.shape, generator=generator) for parameter in parameters]
    if skip is not None:
        expected[skip] = parameters[skip].detach().clone()
    chosen = [index for index in range(len(parameters)) if index != skip]
    returns.begin({parameters[index] for index in chosen})
    for position in torch.randperm(len(chosen), generator=torch.Generator().manual_seed(dist.get_rank())).tolist():
        index = chosen[position]
        local = shard_map.local(parameters[index])
        if local.numel():  # An empty update would count as a write to the whole.
            local.copy_(shard_map.local(parameters[index], expected[index]))
        returns.updated([parameters[index]])
    returns.finish_updates()
    return expected


def _steps(num_in_bucket: int, grid: list[list[int]]) -> None:
    parameters, _, returns = setup = _setup(num_in_bucket, grid)
    for seed, skip in enumerate([None, 1, None, 4]):  # The parameters of a bucket vary.
        expected = _step(setup, seed, skip=skip)
        returns.wait_all()
        assert all(torch.equal(parameter, value) for parameter, value in zip(parameters, expected, strict=True))


@pytest.mark.parametrize(("num_in_bucket", "grid"), [(1, [[0, 1], [2, 3]]), (3, [[0, 2], [1, 3]])], ids=str)
def test_all_ranks_hold_the_new_values(gloo: ProcessPool, num_in_bucket: int, grid: list[list[int]]) -> None:
    gloo.run(_steps, num_in_bucket, grid)


def _wait_alone() -> None:
    """Rank 0 reads all values while no other rank asks for any."""
    parameters, _, returns = setup = _setup(2, [[0, 1], [2, 3]])
    expected = _step(setup, 1)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        returns.wait_all()
        store.set("rank 0 has read", "")
    store.wait(["rank 0 has read"])
    returns.wait_all()
    assert all(torch.equal(parameter, value) for parameter, value in zip(parameters, expected, strict=True))


def test_a_rank_that_reads_values_alone_waits_for_nobody(gloo: ProcessPool) -> None:
    gloo.run(_wait_alone)
