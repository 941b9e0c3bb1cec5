"""Messages, sums and questions between ranks, buffers without new memory, and numbers on their way to the host."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightning_muon.comm.agreement import fail_together, gather, on_first_rank, require_equal, together
from lightning_muon.comm.collectives import BufferPool, start_messages, start_reading
from lightning_muon.comm.groups import ALONE, AxisGroup, axis_group
from lightning_muon.comm.reduce_scatter import PendingSum, SideStream, flat_gradient
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


def _compare(of_last: tuple[tuple[str, str], ...]) -> list[str]:
    lines = ("a", "(1,)"), ("b", "(2,)")
    require_equal(of_last if dist.get_rank() == 2 else lines, None, "the model")
    return gather(f"of rank {dist.get_rank()}", None)


def test_a_difference_is_named_on_all_ranks(gloo: ProcessPool) -> None:
    equal = ("a", "(1,)"), ("b", "(2,)")
    assert gloo.run(_compare, equal, world_size=3) == [["of rank 0", "of rank 1", "of rank 2"]] * 3
    for different, what in ((("a", "(1,)"), ("b", "(3,)")), r"'b' \(3,\)"), (equal[:1], "nothing more"):
        message = rf"the model differs .* rank 0 of the group has 'b' \(2,\), rank 2 has {what}"
        gloo.expect_error_on_all_ranks(_compare, different, match=message, exception=RuntimeError, world_size=3)


def _divide(*, on_first: bool) -> str:
    rank = dist.get_rank()
    try:
        if on_first:
            on_first_rank(lambda: 1 // rank)
        return f"{together(lambda: 12 // (rank if rank else 3))}"
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"


def test_each_rank_gets_its_own_result_or_all_fail(gloo: ProcessPool) -> None:
    assert gloo.run(_divide, on_first=False, world_size=3) == ["4", "12", "6"]
    first, *others = gloo.run(_divide, on_first=True, world_size=3)
    assert first.startswith("ZeroDivisionError")
    assert others == [f"RuntimeError: rank 0 of the group failed, so all ranks stop: {first}"] * 2


def test_without_processes_an_error_is_raised_at_once() -> None:
    require_equal([("a", "1")], None, "the model")
    assert gather("alone", None) == ["alone"]
    with pytest.raises(ValueError, match="disk full"):
        fail_together(ValueError("disk full"), None)


def test_every_dtype_comes_back_as_it_was_when_asked_for() -> None:
    large = 2**62 + 1
    tensors = [
        torch.tensor([1, 0], dtype=torch.int32),
        torch.tensor(large),
        torch.tensor([True, False, True]),
        torch.tensor([[0.5], [float("inf")]], dtype=torch.float64),
        torch.empty(0),
    ]
    read = start_reading(tensors)
    for tensor in tensors:
        tensor.zero_()

    assert read() == [[1, 0], [large], [True, False, True], [0.5, float("inf")], []]
    assert start_reading([])() == []
