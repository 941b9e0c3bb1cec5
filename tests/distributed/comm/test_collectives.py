"""Packed exchanges: uneven, empty, and without new memory from the second use on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lightning_muon.comm.collectives import BufferPool, parts, start_all_to_all, start_messages, start_messages_together
from lightning_muon.comm.groups import axis_group
from tests.support.processes import ProcessPool


def _exchange() -> list[torch.Tensor]:
    """Rank r sends ``r`` times a part of shape (r, p + 1) to each peer p."""
    size, rank = dist.get_world_size(), dist.get_rank()
    group = axis_group(init_device_mesh("cpu", (size,)), (0,))
    to = parts(list(range(size)), [(rank, peer + 1) for peer in range(size)], size)
    source = parts(list(range(size)), [(peer, rank + 1) for peer in range(size)], size)
    pool = BufferPool(torch.bfloat16, torch.device("cpu"))
    send, receive = pool.take("send", to.numel), pool.take("receive", source.numel)
    for peer, view in enumerate(to.views(send)):
        view.fill_(10 * rank + peer)
    for work in start_all_to_all(send, to, receive, source, group):
        work.wait()
    return [view.float() for view in source.views(receive)]


def test_uneven_and_empty_parts_arrive_in_their_shape(gloo: ProcessPool) -> None:
    for rank, received in enumerate(gloo.run(_exchange, world_size=3)):
        for peer, part in enumerate(received):
            assert part.shape == (peer, rank + 1)
            assert (part == 10 * peer + rank).all()


def _tell(start: Callable[..., Any]) -> list[list[float]]:
    """Each rank tells all higher ranks its number, from one piece of memory; the last one has nothing to tell."""
    size, rank = dist.get_world_size(), dist.get_rank()
    group = axis_group(init_device_mesh("cpu", (size,)), (0,))
    news = torch.full((rank + 1,), float(rank))
    received = {peer: torch.full((peer + 1,), -1.0) for peer in range(rank)}
    for work in start(dict.fromkeys(range(rank + 1, size), news), received, group):
        work.wait()
    return [buffer.tolist() for buffer in received.values()]


@pytest.mark.parametrize("start", [start_messages, start_messages_together])
def test_one_piece_of_memory_goes_to_several_ranks(gloo: ProcessPool, start: Callable[..., Any]) -> None:
    assert gloo.run(_tell, start, world_size=3) == [[], [[0.0]], [[0.0], [1.0, 1.0]]]


def _is_completed_by_itself() -> bool:
    size, rank = dist.get_world_size(), dist.get_rank()
    group = axis_group(init_device_mesh("cpu", (size,)), (0,))
    received = torch.zeros(1)
    (work,) = start_messages_together({1 - rank: torch.ones(1)}, {1 - rank: received}, group)
    deadline = time.monotonic() + 20
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.01)
    is_completed = work.is_completed()
    work.wait()
    return is_completed and received.item() == 1


def test_messages_sent_together_complete_without_waiting(gloo: ProcessPool) -> None:
    assert gloo.run(_is_completed_by_itself, world_size=2) == [True, True]


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
