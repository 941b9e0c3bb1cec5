"""Questions that all ranks answer alike."""

from __future__ import annotations

import torch.distributed as dist

from lightning_muon.comm.agreement import fail_together, gather, on_first_rank, require_equal, together
from tests.support.processes import ProcessPool


def _compare(odd_rank: int | None) -> None:
    lines = [("a", "(1,)"), ("b", "(2,)")]
    if dist.get_rank() == odd_rank:
        lines = [("a", "(1,)"), ("b", "(3,)")]
    require_equal(lines, None, "the model")


def test_equal_lines_pass_and_a_difference_is_named_on_all_ranks(gloo: ProcessPool) -> None:
    assert gloo.run(_compare, None, world_size=3) == [None] * 3
    message = r"the model differs .* rank 0 of the group has 'b' \(2,\), rank 2 has 'b' \(3,\)"
    gloo.expect_error_on_all_ranks(_compare, 2, match=message, exception=RuntimeError, world_size=3)


def _gather() -> list[str]:
    return gather(f"of rank {dist.get_rank()}", None)


def test_all_ranks_get_the_values_of_all(gloo: ProcessPool) -> None:
    assert gloo.run(_gather, world_size=3) == [["of rank 0", "of rank 1", "of rank 2"]] * 3
    assert gloo.run(_gather, world_size=1) == [["of rank 0"]]


def _fewer_lines() -> None:
    require_equal([("a", "1")] * (1 + dist.get_rank()), None, "the model")


def test_a_missing_line_is_named(gloo: ProcessPool) -> None:
    gloo.expect_error_on_all_ranks(_fewer_lines, match="nothing more", exception=RuntimeError, world_size=2)


def _fail_on(rank: int | None) -> str:
    error = ValueError("disk full") if dist.get_rank() == rank else None
    try:
        fail_together(error, None)
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return "passed"


def test_one_failing_rank_fails_all(gloo: ProcessPool) -> None:
    assert gloo.run(_fail_on, None, world_size=3) == ["passed"] * 3
    results = gloo.run(_fail_on, 1, world_size=3)
    assert results[1] == "ValueError: disk full"
    assert (
        results[0] == results[2] == "RuntimeError: rank 1 of the group failed, so all ranks stop: ValueError: disk full"
    )


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
    assert all(other.startswith("RuntimeError: rank 0 of the group failed") for other in others)


def test_without_processes_an_error_is_raised_at_once() -> None:
    require_equal([("a", "1")], None, "the model")
    assert _fail_alone() == "disk full"


def _fail_alone() -> str:
    try:
        fail_together(ValueError("disk full"), None)
    except ValueError as error:
        return str(error)
    return "passed"
