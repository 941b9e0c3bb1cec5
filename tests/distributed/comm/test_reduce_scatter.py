"""Sums over ranks of which each rank gets a part: uneven, empty and overlapping parts, replicas, 16-bit floats."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightning_muon.comm.groups import ALONE, AxisGroup, axis_group
from lightning_muon.comm.reduce_scatter import PendingSum, ReduceLeg, SideStream, flat_gradient
from tests.support.processes import ProcessPool

CPU = torch.device("cpu")
# Elements for ranks 0, 1, ... of the group.
COUNTS = [[5, 0, 3, 9], [1, 1, 1, 1], [0, 7, 0, 0], [0, 0, 0, 0]]


def _values(rank: int, count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


def _start(send: Tensor, counts: list[int], group: AxisGroup, replicate: AxisGroup, side: SideStream) -> PendingSum:
    parts = send.split(counts)
    others = torch.cat([send[:0], *(part for rank, part in enumerate(parts) if rank != group.rank)])
    return PendingSum(parts[group.rank].clone(), others, [ReduceLeg(group, counts)], replicate=replicate, side=side)


def _sum_parts(mesh_shape: tuple[int, int], *, poll: bool) -> None:
    """Several sums at once; every part is compared with the sum in one process."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
    replicate, shard = axis_group(mesh, (0,)), axis_group(mesh, (1,))
    side = SideStream(CPU)
    sums = [
        _start(_values(dist.get_rank(), sum(counts[: shard.size])), counts[: shard.size], shard, replicate, side)
        for counts in COUNTS
    ]
    deadline = time.monotonic() + 10
    for pending in sums:
        while poll and not pending.advance() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert pending.advance(wait=not poll) or replicate.group is None
    for counts, pending in zip(COUNTS, sums, strict=True):
        counts = counts[: shard.size]
        total = torch.stack([_values(rank, sum(counts)) for rank in range(dist.get_world_size())]).sum(0)
        # The order of the additions differs from the reference.
        torch.testing.assert_close(pending.result(), total.split(counts)[shard.rank], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("mesh_shape", "poll"), [((1, 1), False), ((1, 3), True), ((2, 2), False), ((2, 2), True), ((3, 1), False)], ids=str
)
def test_every_rank_gets_the_sum_of_its_part(gloo: ProcessPool, mesh_shape: tuple[int, int], poll: bool) -> None:
    gloo.run(_sum_parts, mesh_shape, poll=poll, world_size=mesh_shape[0] * mesh_shape[1])


def _sum_in_order() -> Tensor:
    group = axis_group(init_device_mesh("cpu", (4,)), (0,))
    total = _start(_values(group.rank, 400), [100] * 4, group, ALONE, SideStream(CPU)).result()
    expected = sum((_values(rank, 400) for rank in range(1, 4)), _values(0, 400))
    assert torch.equal(total, expected.split(100)[group.rank])
    # In bfloat16, 256 + 1 is 256 again.
    value = torch.tensor([256.0, 1.0, -256.0, 0.0])[group.rank].bfloat16()
    return _start(value.expand(10).contiguous(), [1, 2, 3, 4], group, ALONE, SideStream(CPU)).result()


def test_ranks_are_added_in_their_order_16_bit_floats_in_float32(gloo: ProcessPool) -> None:
    for rank, total in enumerate(gloo.run(_sum_in_order)):
        assert torch.equal(total.float(), torch.ones(rank + 1))


def test_a_gradient_is_made_flat_and_dense() -> None:
    parameter, gradient = torch.zeros(4, 3, dtype=torch.bfloat16), torch.randn(3, 4).t()
    assert torch.equal(flat_gradient(parameter, gradient), gradient.contiguous().view(-1).bfloat16())
    sparse = flat_gradient(torch.zeros(4, 3), torch.eye(4, 3).to_sparse())
    assert torch.equal(sparse, torch.eye(4, 3).view(-1))
