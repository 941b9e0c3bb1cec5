"""Where the sums of all gradients are afterwards."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_muon.comm.groups import axis_group
from lightning_muon.grad_sync.transports import AllReduce
from tests.support.processes import ProcessPool

SHAPES = [(13, 7), (), (5,), (0, 3)]


def _gradients(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def _transport() -> AllReduce:
    return AllReduce(axis_group(init_device_mesh("cpu", (dist.get_world_size(),)), (0,)))


def _sum() -> list[Tensor]:
    """Rank 1 lacks the first gradient; the third counts for nobody; everything is divided by 10."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    gradients: list[Tensor | None] = [*_gradients(dist.get_rank())]
    if dist.get_rank() == 1:
        gradients[0] = None
    pending = _transport().start(dict(zip(parameters, gradients, strict=True)))
    assert pending.advance()
    pending.finish(10.0, {parameters[0], parameters[1], parameters[3]})
    assert parameters[2].grad is None
    reduced = [parameter.grad for parameter in parameters if parameter.grad is not None]
    assert [tensor.shape for tensor in reduced] == [(13, 7), (), (0, 3)]
    assert len({tensor.untyped_storage().data_ptr() for tensor in reduced}) == 1
    return [tensor.clone() for tensor in reduced]


def test_gradients_become_views_of_one_buffer_and_missing_ones_count_as_zeros(gloo: ProcessPool) -> None:
    for world_size in (1, 2, 3):
        by_rank = [_gradients(rank) for rank in range(world_size)]
        if world_size > 1:
            by_rank[1][0].zero_()
        expected = [sum(tensors) / 10 for tensors in zip(*by_rank, strict=True)]
        for reduced in gloo.run(_sum, world_size=world_size):
            torch.testing.assert_close(reduced, [expected[0], expected[1], expected[3]], rtol=0, atol=1e-6)
