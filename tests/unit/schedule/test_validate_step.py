"""Programs that would run but are no optimizer step are refused, and op and rank are named."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_muon.schedule.muon import MuonPlan, plan_step
from lightning_muon.schedule.passes import host_order, prefetch, with_adamw, with_backward
from lightning_muon.schedule.program import Op
from lightning_muon.schedule.validate import check_plan
from lightning_muon.schedule.validate_step import validate_step
from tests.unit.schedule.specs import plans, sharded


@settings(deadline=None)
@given(plans(), st.integers(0, 4))
def test_every_plan_and_every_order_of_it_is_a_step(plan: MuonPlan, look_ahead: int) -> None:
    check_plan(plan)
    issued = prefetch(with_adamw(plan.program, [5] * len(plan.program)), look_ahead)
    validate_step(issued, plan.owners)
    validate_step(host_order(issued), plan.owners)
    validate_step(with_backward(plan.program, [3] * len(plan.chunks)), plan.owners)


def test_a_matrix_on_one_rank_alone_needs_no_ops_elsewhere() -> None:
    specs = [replace(spec, held=(spec.numel, 0)) for spec in sharded([8, 8], 2)]
    plan = plan_step(specs, num_ranks=2, itemsize=2, chunk_bytes=16, keep_idle=False)
    assert not plan.program[1]
    check_plan(plan)


def _plan() -> MuonPlan:
    """Two chunks of two matrices: 3 and 2, then 1 and 0; rank 0 owns 3 and 1."""
    plan = plan_step(sharded([8, 8, 8, 8], 2, flops=[7, 6, 8, 9]), num_ranks=2, itemsize=2, chunk_bytes=16)
    assert plan.owners == ((1,), (0,), (1,), (0,))
    return plan


def _changed(name: str, rank: int, change: Callable[[Op], Op | None]) -> MuonPlan:
    plan = _plan()
    ops = [change(op) if op.name == name else op for op in plan.program[rank]]
    return replace(plan, program={**plan.program, rank: [op for op in ops if op is not None]})


def _with_items(*items: int) -> Callable[[Op], Op]:
    return lambda op: replace(op, items=items)


def _with_deps(*deps: str) -> Callable[[Op], Op]:
    return lambda op: replace(op, deps=deps)


@pytest.mark.parametrize(
    ("name", "rank", "change", "message"),
    [
        ("newton_schulz[0]", 0, _with_items(), r"newton_schulz\[0\] of rank 0 has matrix 3 0 times, but .* \(0,\)"),
        ("newton_schulz[0]", 1, _with_items(2, 3), r"newton_schulz\[0\] of rank 1 has matrix 3 1 times, but .* \(0,\)"),
        (
            "newton_schulz[0]",
            0,
            _with_items(3, 1),
            r"newton_schulz\[0\] of rank 0 works on matrix 1, .* not in chunk 0",
        ),
        ("newton_schulz[0]", 0, _with_items(3, 3), r"newton_schulz\[0\] of rank 0 has matrix 3 2 times"),
        ("newton_schulz[1]", 0, _with_items(4), r"newton_schulz\[1\] of rank 0 works on matrix 4"),
        ("update[0]", 1, _with_items(3), r"update\[0\] of rank 1 works on the matrices \(3,\) and .* on \(3, 2\)"),
        ("newton_schulz[0]", 1, lambda op: None, r"rank 1 has momentum\[0\] but no newton_schulz\[0\]"),
        ("update[1]", 0, lambda op: None, r"rank 0 has momentum\[1\] but no update\[1\]"),
        ("momentum[1]", 0, lambda op: None, r"rank 0 has gather\[1\] but no momentum\[1\]"),
        ("newton_schulz[0]", 0, _with_deps(), r"newton_schulz\[0\] of rank 0 does not depend on gather\[0\]"),
        ("update[0]", 0, _with_deps("newton_schulz[0]"), r"update\[0\] of rank 0 does not depend on scatter\[0\]"),
        (
            "newton_schulz[1]",
            0,
            _with_deps("gather[1]", "gather[0]"),
            r"newton_schulz\[1\] of rank 0 depends on gather\[0\], whose result is for newton_schulz\[0\] alone",
        ),
        (
            "update[1]",
            1,
            _with_deps("scatter[1]", "scatter[0]"),
            r"update\[1\] of rank 1 depends on scatter\[0\], whose result is for update\[0\] alone",
        ),
        ("update[1]", 1, lambda op: replace(op, key="0"), r"update\[0\] of rank 1"),
    ],
)
def test_a_broken_step_is_refused(name: str, rank: int, change: Callable[[Op], Op | None], message: str) -> None:
    plan = _changed(name, rank, change)
    with pytest.raises(ValueError, match=message):
        validate_step(plan.program, plan.owners)
    with pytest.raises(ValueError, match=r"rank|matrix"):
        check_plan(plan)


def test_a_matrix_without_chunk_or_owner_or_in_two_chunks_is_refused() -> None:
    plan = _plan()
    with pytest.raises(ValueError, match="matrix 4 is in no chunk"):
        check_plan(replace(plan, owners=(*plan.owners, (0,))))
    with pytest.raises(ValueError, match=r"momentum\[0\] of rank 0 works on matrix 3, but there are 3 matrices"):
        check_plan(replace(plan, owners=plan.owners[:3]))
    idle = {
        rank: [replace(op, items=()) if op.kind == "newton_schulz" else op for op in ops]
        for rank, ops in plan.program.items()
    }
    with pytest.raises(ValueError, match=r"matrix 0 has no owner, so newton_schulz\[1\] leaves it out"):
        validate_step(idle, [()] * 4)
    twice = {
        rank: [replace(op, items=(3, 2)) if op.key == "1" else op for op in ops] for rank, ops in plan.program.items()
    }
    with pytest.raises(ValueError, match=r"momentum\[1\] of rank 0 works on matrix 3, which chunk 0 has too"):
        validate_step(twice, plan.owners)


def test_100_000_ops_are_checked_in_about_a_second() -> None:
    plan = plan_step(sharded([128] * 20_000, 64), num_ranks=64, itemsize=2, chunk_bytes=1)
    assert sum(map(len, plan.program.values())) > 100_000
    started = time.process_time()
    check_plan(plan)
    # 0.9 to 1.3 seconds of one core; a check that compares pairs of ops takes minutes.
    assert time.process_time() - started < 5
