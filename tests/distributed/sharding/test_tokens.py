"""What a rank reports wrongly of its tokens is the same error on all."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from lightning_muon.comm.collectives import AxisGroup, axis_group
from lightning_muon.sharding.tokens import TokenCount
from tests.support.processes import ProcessPool


def _everyone() -> AxisGroup:
    return axis_group(init_device_mesh("cpu", (dist.get_world_size(),)), (0,))


def _fill(count: TokenCount, reports: list[list[Any]]) -> TokenCount:
    for values in reports:
        count.begin_micro_batch()
        for value in values:
            count.report(value)
    return count


def _rank_2_reports(bad: list[list[Any]]) -> None:
    good: list[list[Any]] = [[3], [torch.tensor(2)], [0], [1, 2]]
    dtensor = distribute_tensor(torch.tensor(3), init_device_mesh("cpu", (3,)), [Replicate()])
    bad = [[dtensor if value == "a DTensor" else value for value in values] for values in bad]
    _fill(TokenCount(_everyone()), bad if dist.get_rank() == 2 else good).total()


def _report_outside(when: str) -> None:
    count = TokenCount(_everyone())
    if when != "before":
        assert _fill(count, [[1]]).total() == 3
    if dist.get_rank() == 1:
        count.report(5)
    if when != "before":
        assert count.total() == 3
    if when == "after, then reset":
        count.reset()
    _fill(count, [[1]]).total()


_AFTER = "^rank 1 reported tokens after they were sum"


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ([[], [1], [1], [1]], "^rank 2 reported no tokens in micro-batch 1 of 4; call self.trainer.strategy.report_to"),
        ([[1], [1], [1, 2.5], [1]], "^rank 2 reported 2.5 as its number of tokens in micro-batch 3 of 4; "),
        ([[1], [torch.tensor(torch.inf)], [1], [1]], "^rank 2 reported inf as its .* micro-batch 2 of 4; "),
        ([["a DTensor"], [1], [1], [1]], "^rank 2 reported a DTensor"),
        ([[torch.tensor(3).bfloat16()], [1]], r"^rank 2 reported a Tensor \(\) of torch.bfloat16 as its .* 1 of 2; "),
        ("before", "^rank 1 reported tokens outside of a training step"),
        ("after", _AFTER),
        ("after, then reset", _AFTER),
    ],
)
def test_what_one_rank_reports_wrongly_is_one_error_on_all(gloo: ProcessPool, what: Any, match: str) -> None:
    program = _report_outside if isinstance(what, str) else _rank_2_reports
    failures = gloo.expect_error_on_all_ranks(program, what, match=match, world_size=3)
    assert len({failure.message for failure in failures.values()}) == 1
