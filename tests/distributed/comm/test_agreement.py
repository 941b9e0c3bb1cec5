"""Questions that all ranks answer alike."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from lightning_muon.comm.agreement import fail_together, gather, on_first_rank, require_equal, together
from tests.support.processes import ProcessPool


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
