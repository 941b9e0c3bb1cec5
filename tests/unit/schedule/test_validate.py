"""Broken programs are refused, and the op is named."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_muon.schedule.graph import DeadlockError
from lightning_muon.schedule.memory import peak_memory
from lightning_muon.schedule.muon import MuonPlan, newton_schulz_ops, plan_step
from lightning_muon.schedule.passes import host_order, prefetch, with_adamw
from lightning_muon.schedule.program import Op, Program
from lightning_muon.schedule.validate import check_step, validate, validate_step
from tests.unit.schedule.programs import collective, compute, recv, send
from tests.unit.schedule.specs import plans, sharded


@settings(deadline=None)
@given(plans(), st.integers(0, 4))
def test_every_plan_is_valid(plan: MuonPlan, look_ahead: int) -> None:
    validate(plan.program)
    issued = prefetch(with_adamw(plan.program, [5] * len(plan.program)), look_ahead)
    validate(issued, memory_bytes=peak_memory(issued).bytes)
    validate(host_order(issued))


def _pair(*kinds: str) -> list[list[Op]]:
    return [[collective(kind, 1, rank=rank, group=(0, 1)) for kind in kinds] for rank in (0, 1)]


def _refused(program: Program, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate(program)


def test_an_op_in_the_list_of_another_rank_is_refused() -> None:
    _refused({1: [compute("a", 1)]}, r"a\[0\] is an op of rank 0 in the list of rank 1")
    validate({0: [compute("a", 1)]})
    specs = sharded([4], 1)
    _refused({0: newton_schulz_ops(specs)[-1]}, r"newton_schulz\[0\] is an op of rank -1 in the list of rank 0")


def test_an_unknown_lane_is_refused() -> None:
    _refused({0: [replace(compute("a", 1), lane="comput")]}, r"a\[0\] of rank 0 is on the lane 'comput'; lanes are")


@pytest.mark.parametrize("change", [{"cost": -1}, {"bytes": -1}, {"memory": -1}, {"axis_bytes": (2, -1)}])
def test_a_negative_size_is_refused(change: dict[str, Any]) -> None:
    _refused({0: [replace(compute("a", 1), **change)]}, r"a\[0\] of rank 0 has .*-1.*; all of them must be at least 0")


def test_a_result_that_nobody_uses_is_refused() -> None:
    _refused({0: [compute("a", 1, memory=3)]}, r"a\[0\] of rank 0 has a result of 3 bytes that nothing uses")


def test_a_name_that_is_there_twice_or_not_at_all_is_refused() -> None:
    _refused({0: [compute("a", 1), compute("a", 1)]}, r"a\[0\] of rank 0 is there twice")
    _refused({0: [compute("a", 1, "b[0]")]}, r"a\[0\] of rank 0 depends on b\[0\]")


def test_a_cycle_is_refused() -> None:
    with pytest.raises(DeadlockError, match=r"a\[0\] of rank 0 waits for b\[0\]"):
        validate({0: [compute("a", 1, "b[0]"), collective("b", 1, "a[0]")]})


def test_a_cycle_over_two_ranks_is_refused() -> None:
    # Each rank wants to hear from the other before it speaks.
    program = {
        0: [recv("there", 1, 0), send("back", 0, 1, "recv[there]")],
        1: [recv("back", 0, 1), send("there", 1, 0, "recv[back]")],
    }
    with pytest.raises(DeadlockError, match=r"recv\[there\] of rank 0 waits for rank 1 \(at recv\[back\]\)"):
        validate(program)


def test_a_communication_that_a_rank_lacks_is_refused() -> None:
    zero, one = _pair("gather", "scatter")
    _refused(
        {0: zero, 1: one[:1]}, r"scatter\[0\] of rank 0 is a communication of ranks \(0, 1\), but rank 1 has no scat"
    )
    other = [replace(one[0], group=(1, 2))]
    _refused({0: zero[:1], 1: other, 2: []}, r"gather\[0\] of rank 0 .* but rank 1 has it with the ranks \(1, 2\)")
    _refused({0: [send("x", 0, 1)], 1: []}, r"send\[x\] of rank 0 .* but rank 1 has no recv\[x\]")


def test_communications_of_a_group_in_another_order_are_refused() -> None:
    zero, one = _pair("gather", "scatter")
    validate({0: zero, 1: one})
    _refused({0: zero, 1: one[::-1]}, r"rank 1 has scatter\[0\] where rank 0 has gather\[0\]")


def test_messages_that_overtake_each_other_are_refused() -> None:
    sends = [send("a", 0, 1), send("b", 0, 1)]
    receives = [recv("a", 0, 1), recv("b", 0, 1)]
    validate({0: sends, 1: receives})
    _refused({0: sends, 1: receives[::-1]}, r"rank 0 sends send\[a\] where rank 1 receives recv\[b\]")


def test_two_sends_do_not_meet() -> None:
    program = {0: [send("a", 0, 1)], 1: [send("a", 1, 0)]}
    _refused(program, r"ranks 0 and 1 both have send\[a\]; one must be the other kind")


def test_messages_in_both_directions_have_an_order_each() -> None:
    # On the lanes of this program the order in between is free.
    program = {
        0: [send("there", 0, 1), recv("back", 1, 0)],
        1: [recv("there", 0, 1), send("back", 1, 0)],
    }
    validate(program)


def test_buffers_above_the_bound_are_refused() -> None:
    program = {0: [compute("a", 1, memory=8), compute("b", 1, "a[0]")]}
    validate(program, memory_bytes=8)
    with pytest.raises(ValueError, match=r"a\[0\] of rank 0 needs 8 bytes of buffers, more than memory_bytes=7"):
        validate(program, memory_bytes=7)


@settings(deadline=None)
@given(plans(), st.integers(0, 4))
def test_every_plan_and_every_order_of_it_is_a_step(plan: MuonPlan, look_ahead: int) -> None:
    check_step(plan.program, [plan])
    issued = prefetch(with_adamw(plan.program, [5] * len(plan.program)), look_ahead)
    validate_step(issued, plan.owners)
    validate_step(host_order(issued), plan.owners)


def test_a_matrix_on_one_rank_alone_needs_no_ops_elsewhere() -> None:
    specs = [replace(spec, held=(spec.numel, 0)) for spec in sharded([8, 8], 2)]
    plan = plan_step(specs, num_ranks=2, itemsize=2, chunk_bytes=16, keep_idle=False)
    assert not plan.program[1]
    check_step(plan.program, [plan])


def _plan() -> MuonPlan:
    """Two buckets of two matrices: 3 and 2, then 1 and 0; rank 0 owns 3 and 1."""
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
            r"newton_schulz\[0\] of rank 0 works on matrix 1, .* not in bucket 0",
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
        check_step(plan.program, [plan])


def test_a_matrix_without_bucket_or_owner_or_in_two_buckets_is_refused() -> None:
    plan = _plan()
    with pytest.raises(ValueError, match="matrix 4 is in no bucket"):
        check_step(plan.program, [replace(plan, owners=(*plan.owners, (0,)))])
    with pytest.raises(ValueError, match=r"momentum\[0\] of rank 0 works on matrix 3, but there are 3 matrices"):
        check_step(plan.program, [replace(plan, owners=plan.owners[:3])])
    idle = {
        rank: [replace(op, items=()) if op.kind == "newton_schulz" else op for op in ops]
        for rank, ops in plan.program.items()
    }
    with pytest.raises(ValueError, match=r"matrix 0 has no owner, so newton_schulz\[1\] leaves it out"):
        validate_step(idle, [()] * 4)
    twice = {
        rank: [replace(op, items=(3, 2)) if op.key == "1" else op for op in ops] for rank, ops in plan.program.items()
    }
    with pytest.raises(ValueError, match=r"momentum\[1\] of rank 0 works on matrix 3, which bucket 0 has too"):
        validate_step(twice, plan.owners)


def test_100_000_ops_are_checked_in_about_a_second() -> None:
    plan = plan_step(sharded([128] * 20_000, 64), num_ranks=64, itemsize=2, chunk_bytes=1)
    assert sum(map(len, plan.program.values())) > 100_000
    started = time.process_time()
    check_step(plan.program, [plan])
    # 0.9 to 1.3 seconds of one core; a check that compares pairs of ops takes minutes.
    assert time.process_time() - started < 5
