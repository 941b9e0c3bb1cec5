"""Messages between ranks, and buffers without new memory from the second use on."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lightning_muon.comm.collectives import BufferPool, start_messages
from lightning_muon.comm.groups import axis_group
from tests.support.processes import ProcessPool


def _tell() -> list[list[float]]:
    """Each rank tells all higher ranks its number, from one piece of memory; the last one has nothing to tell."""
    size, rank = dist.get_world_size(), dist.get_rank()
    group = axis_group(init_device_mesh("cpu", (size,)), (0,))
    news = torch.full((rank + 1,), float(rank))
    received = {peer: torch.full((peer + 1,), -1.0) for peer in range(rank)}
    works = start_messages(dict.fromkeys(range(rank + 1, size), news), received, group)
    for work in works:
        work.wait()
    return [buffer.tolist() for buffer in received.values()]


def test_one_piece_of_memory_goes_to_several_ranks(gloo: ProcessPool) -> None:
    assert gloo.run(_tell, world_size=3) == [[], [[0.0]], [[0.0], [1.0, 1.0]]]


def test_the_pool_keeps_its_memory_and_views_outlive_a_release() -> None:
    pool = BufferPool(torch.float32, torch.device("cpu"))
    first, view = pool.take("gather-0", 10), pool.take("gather-0", 7)[2:5].view(3, 1)
    other = pool.take("scatter-0", 7)
    pool.release("gather")
    assert [buffer.untyped_storage().nbytes() for buffer in (first, other)] == [0, 4 * 7]
    assert pool.take("gather-0", 10) is first and pool.take("gather-1", 7) is not first
    first.fill_(3)
    assert view.tolist() == [[3.0]] * 3
    assert pool.take("gather-0", 11).numel() == 11
