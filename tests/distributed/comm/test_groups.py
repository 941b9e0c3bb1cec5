"""Process groups over axes and of one owner; questions between ranks."""

import datetime
import logging
import re
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lightning_muon.comm import agreement
from lightning_muon.comm.agreement import on_first_rank, together
from lightning_muon.comm.collectives import (
    AxisGroup,
    axis_group,
    backends,
    host_group,
    make_buckets,
    own_group,
    start_messages,
    start_reading,
)
from tests.support.lazy_connections import nccl_like_mesh
from tests.support.processes import ProcessPool


def _sum_of_ranks(group: AxisGroup) -> int:
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total, group=group.group)
    return int(total)


def _with_unequal_numbers_of_groups() -> tuple[list[int], list[str]]:
    for members in ([0], [0, 1], [0]):
        dist.new_group(members)
    mesh = init_device_mesh("cpu", (2, 2))
    # Of the rows only the first is used, as a pipeline does whose stages have different parameters.
    groups = [axis_group(mesh, (0, 1)), axis_group(mesh, (1,)), axis_group(mesh, (0,))]
    if dist.get_rank() < 2:
        groups.append(own_group(groups[1]))
    groups += [host_group(group) for group in groups[:3]] + [own_group(group) for group in groups[:3]]
    names = [group.group.group_name for group in groups if group.group is not None]
    return [_sum_of_ranks(group) for group in groups], [name for name in names if "lightning_muon" in name]


def test_ranks_of_different_numbers_of_groups_find_each_other(gloo: ProcessPool) -> None:
    results = gloo.run(_with_unequal_numbers_of_groups)
    of_all, of_rows, of_columns = [6] * 4, [1, 1, 5, 5], [2, 4, 2, 4]
    for rank, (sums, names) in enumerate(results):
        expected = [of_all[rank], of_rows[rank], of_columns[rank]]
        assert sums == expected + ([1] if rank < 2 else []) + expected * 2
        assert names[-3] == results[0][1][-3] and len(names) == len(set(names))


def _nobody_else_comes() -> float:
    torch.distributed.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1))
    axes = axis_group(init_device_mesh("cpu", (2,)), (0,))
    begin = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError):
            host_group(axes)
    return time.monotonic() - begin


def test_making_a_group_waits_no_longer_than_the_default_group(gloo: ProcessPool) -> None:
    assert gloo.run_fresh(_nobody_else_comes, world_size=2)[0] < 20.0


def _backends_follow_the_mesh() -> list[dict[str, str]]:
    whole = axis_group(nccl_like_mesh(1, 2), (0, 1))
    groups = [whole, own_group(whole), host_group(whole)]
    return [backends(group.group) for group in groups if group.group is not None]


def test_groups_take_the_backend_of_their_mesh(gloo: ProcessPool) -> None:
    for of_mesh, own, of_host in gloo.run(_backends_follow_the_mesh, world_size=2):
        assert of_mesh == own == {"cpu": "lazy"}
        assert of_host["cpu"] == "gloo"


def _messages_from_a_card() -> None:
    group = axis_group(init_device_mesh("cpu", (2,)), (0,))
    start_messages({}, {1 - group.rank: mock.Mock(is_cuda=True)}, group)


def test_messages_from_a_card_over_gloo_are_refused(gloo: ProcessPool) -> None:
    gloo.expect_error_on_all_ranks(_messages_from_a_card, match="on CUDA .* use NCCL", world_size=2)


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


def _calls_that_a_rank_makes_late() -> list[str]:
    """What this rank says while it waits for the others; rank 1 comes late to every second call."""
    said, logger, handler = list[str](), logging.getLogger(agreement.__name__), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    host = host_group(axis_group(init_device_mesh("cpu", (2,)), (0,)))
    logger.addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "_LATE", 1)
        for call in (lambda: agreement.maxima_over(host, [1]), agreement.await_all_ranks):
            call()
            time.sleep(2 * dist.get_rank())
            call()
    logger.removeHandler(handler)
    return said


def test_a_rank_that_calls_alone_says_where_it_waits(gloo: ProcessPool) -> None:
    waits, comes_late = gloo.run(_calls_that_a_rank_makes_late, world_size=2)
    assert len(waits) == 2 and not comes_late
    assert all(re.match(r"rank 0 has waited for 1 s for other ranks, at .*test_groups\.py:\d+\.", w) for w in waits)
    with (
        pytest.raises(RuntimeError, match=r"rank 0 has waited until the timeout of .* at .*test_groups\.py:\d+\."),
        agreement.named_waits(late=False),
    ):
        raise RuntimeError("Timed out waiting 1800000ms for recv operation to complete")


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


def test_buckets_are_in_the_order_of_backward() -> None:
    """That in which their last gradients come, of two dtypes by turns."""
    tensors = [torch.full((4,), place, dtype=(torch.float32, torch.bfloat16)[place % 2]) for place in range(6)]
    found = [[int(each[0]) for each in bucket] for bucket in make_buckets(tensors, 32)]
    assert found == [[4, 2], [5, 3, 1], [0]]
