"""Broken programs are refused, and the op is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_muon.schedule.graph import DeadlockError
from lightning_muon.schedule.memory import peak_memory
from lightning_muon.schedule.muon import MuonPlan, newton_schulz_ops
from lightning_muon.schedule.passes import host_order, prefetch, with_adamw, with_backward
from lightning_muon.schedule.program import Op, Program
from lightning_muon.schedule.validate import validate
from tests.unit.schedule.programs import collective, compute, recv, send
from tests.unit.schedule.specs import plans, sharded


@settings(deadline=None)
@given(plans(), st.integers(0, 4))
def test_every_plan_is_valid(plan: MuonPlan, look_ahead: int) -> None:
    validate(plan.program)
    issued = prefetch(with_adamw(plan.program, [5] * len(plan.program)), look_ahead)
    validate(issued, memory_bytes=peak_memory(issued).bytes)
    validate(host_order(issued))
    validate(with_backward(plan.program, [3] * len(plan.chunks)))


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
