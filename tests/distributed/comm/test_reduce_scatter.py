"""Sums over ranks of which each rank gets a part, uneven or empty; 16-bit floats."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightning_muon.comm.groups import ALONE, AxisGroup, axis_group
from lightning_muon.comm.reduce_scatter import PendingSum, SideStream, flat_gradient
from tests.support.processes import ProcessPool


def _values(rank: int, count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


def _start(send: Tensor, counts: list[int], group: AxisGroup) -> PendingSum:
    parts = send.split(counts)
    others = torch.cat([send[:0], *(part for rank, part in enumerate(parts) if rank != group.rank)])
    legs, side = [(group, counts)], SideStream(torch.device("cpu"))
    return PendingSum(parts[group.rank].clone(), others, legs, replicate=ALONE, side=side)


def _sum_in_order() -> Tensor:
    group = axis_group(init_device_mesh("cpu", (4,)), (0,))
    total = _start(_values(group.rank, 400), [100, 0, 250, 50], group).result()
    expected = sum((_values(rank, 400) for rank in range(1, 4)), _values(0, 400))
    assert torch.equal(total, expected.split([100, 0, 250, 50])[group.rank])
    # In bfloat16, 256 + 1 is 256 again.
    value = torch.tensor([256.0, 1.0, -256.0, 0.0])[group.rank].bfloat16()
    return _start(value.expand(10).contiguous(), [1, 2, 3, 4], group).result()


def test_ranks_are_added_in_their_order_16_bit_floats_in_float32(gloo: ProcessPool) -> None:
    for rank, total in enumerate(gloo.run(_sum_in_order)):
        assert torch.equal(total.float(), torch.ones(rank + 1))


def test_a_gradient_is_made_flat_and_dense() -> None:
    parameter, gradient = torch.zeros(4, 3, dtype=torch.bfloat16), torch.randn(3, 4).t()
    assert torch.equal(flat_gradient(parameter, gradient), gradient.contiguous().view(-1).bfloat16())
    sparse = flat_gradient(torch.zeros(4, 3), torch.eye(4, 3).to_sparse())
    assert torch.equal(sparse, torch.eye(4, 3).view(-1))
