"""Buffers of rank 0, of every dtype."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_muon.sharding.weights import broadcast_buffers
from tests.support.processes import ProcessPool


def _buffers() -> list[Tensor]:
    module, rank = nn.Module(), dist.get_rank()
    module.register_buffer("mean", torch.arange(6.0).view(2, 3).T + rank)
    module.register_buffer("flag", torch.tensor([True, rank == 0]))
    module.register_buffer("count", torch.tensor(rank + 3))
    module.register_buffer("small", torch.full((2,), rank + 0.5, dtype=torch.bfloat16))
    module.register_buffer("empty", torch.zeros(0))
    broadcast_buffers(module)
    return list(module.buffers())


def test_all_ranks_get_the_buffers_of_rank_0(gloo: ProcessPool) -> None:
    first, *others = gloo.run(_buffers, world_size=3)
    assert torch.equal(first[0], torch.arange(6.0).view(2, 3).T)
    for other in others:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(other, first, strict=True))
