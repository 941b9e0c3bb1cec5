"""Broken programs are refused, and the op is named; what waits for what."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_muon.schedule.graph import DeadlockError, build_graph
from lightning_muon.schedule.muon import MuonPlan
from lightning_muon.schedule.passes import host_order, prefetch
from lightning_muon.schedule.program import Op, Program
from lightning_muon.schedule.validate import check_step, validate, validate_step
from tests.unit.schedule.programs import collective, compute, programs
from tests.unit.schedule.specs import plan_of, plans, sharded, with_adamw


@settings(deadline=None)
@given(plans(), st.integers(0, 4))
def test_every_plan_and_every_order_of_it_is_a_step(plan: MuonPlan, look_ahead: int) -> None:
    check_step(plan.program, [plan])
    issued = prefetch(with_adamw(plan.program), look_ahead)
    for program in (issued, host_order(issued)):
        validate(program)
        validate_step(program, plan.owners)


def _pair(*kinds: str) -> list[list[Op]]:
    return [[collective(kind, 1, rank=rank, group=(0, 1)) for kind in kinds] for rank in (0, 1)]


_ZERO, _ONE = _pair("gather", "scatter")


def _op(**change: Any) -> Program:
    return {0: [replace(compute("a", 1), **change)]}


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ({1: [compute("a", 1)]}, r"a\[0\] of rank 0 is in the list of rank 1"),
        (_op(lane="comput"), r"a\[0\] of rank 0 is on the lane 'comput'; lanes are"),
        (_op(phase="later"), r"a\[0\] of rank 0 runs 'later'"),
        *(
            (_op(**change), r"a\[0\] of rank 0 has .*-1.*; all of them must be at least 0")
            for change in ({"cost": -1}, {"bytes": -1}, {"memory": -1}, {"axis_bytes": (2, -1)})
        ),
        (_op(memory=3), r"a\[0\] of rank 0 has a result of 3 bytes that nothing uses"),
        ({0: [compute("a", 1), compute("a", 1)]}, r"a\[0\] of rank 0 is there twice"),
        ({0: [compute("a", 1, "gone[0]")]}, r"a\[0\] of rank 0 depends on gone\[0\], which this rank does not have"),
        # Groups.
        ({0: [collective("all", 1, group=(1, 2))]}, r"all\[0\] of rank 0 is a communication of ranks \(1, 2\), to"),
        ({0: [collective("all", 1, group=(0, 0))]}, r"all\[0\] of rank 0 has a rank twice in its group \(0, 0\)"),
        # Communications that a rank lacks, or has with others.
        ({0: _ZERO, 1: _ONE[:1]}, r"rank 1 has None where rank 0 has scatter\[0\]"),
        ({0: _ZERO[:1], 1: [replace(_ONE[0], group=(1, 2))], 2: []}, r"gather\[0\] of rank 0 waits for rank 1 \(which"),
        # Other orders.
        ({0: _ZERO, 1: _ONE[::-1]}, r"rank 1 has scatter\[0\] where rank 0 has gather\[0\]"),
    ],
)
def test_a_broken_program_is_refused(program: Program, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate(program)


def _in(kind: str, rank: int, *group: int) -> Op:
    return collective(kind, 1, rank=rank, group=group)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            {0: [compute("a", 1, "b[0]"), compute("b", 1)]},
            r"2 ops can never begin: a\[0\] of rank 0 waits for b\[0\]",
        ),
        (
            {0: [compute("a", 1, "b[0]"), collective("b", 1, "a[0]")]},
            r"a\[0\] of rank 0 waits for b\[0\]; b\[0\] of rank 0 waits for a\[0\]",
        ),
        (
            {
                0: [_in("a", 0, 0, 1), _in("b", 0, 0, 2)],
                1: [_in("c", 1, 1, 2), _in("a", 1, 0, 1)],
                2: [_in("b", 2, 0, 2), _in("c", 2, 1, 2)],
            },
            r"a\[0\] of rank 0 waits for rank 1 \(at c\[0\]\)",
        ),
        (
            {rank: [_in("gather", rank, 0, 1, 2)] for rank in (0, 1)},
            r"gather\[0\] of rank 0 waits for rank 2 \(which has no such op\)",
        ),
        ({rank: [_in("gather", rank, *range(99))] for rank in range(20)}, "20 ops can never begin: .*; and 12 more"),
    ],
    ids=["chain", "cycle", "ranks", "missing rank", "many"],
)
def test_a_deadlock_names_who_waits_for_what(program: Program, message: str) -> None:
    with pytest.raises(DeadlockError, match=message):
        validate(program)


@settings(deadline=None)
@given(programs())
def test_every_node_comes_behind_all_that_it_waits_for(program: Program) -> None:
    graph = build_graph(program)
    place = {node: index for index, node in enumerate(graph.order())}
    assert len(place) == len(graph.nodes)
    for op, before in enumerate(graph.waits):
        assert all(place[graph.node_of[other]] < place[graph.node_of[op]] for other in before)


@pytest.fixture
def plan() -> MuonPlan:
    """Two buckets of two matrices: 3 and 2, then 1 and 0; rank 0 owns 3 and 1."""
    plan = plan_of(sharded([8, 8, 8, 8], 2, flops=[7, 6, 8, 9]), chunk_bytes=16)
    assert plan.owners == ((1,), (0,), (1,), (0,))
    return plan


def _items(*items: int) -> Callable[[Op], Op]:
    return lambda op: replace(op, items=items)


def _deps(*deps: str) -> Callable[[Op], Op]:
    return lambda op: replace(op, deps=deps)


@pytest.mark.parametrize(
    ("name", "rank", "change", "message"),
    [
        ("newton_schulz[0]", 0, _items(), r"newton_schulz\[0\] has matrix 3 on the ranks \[\], .* \[0\]"),
        ("newton_schulz[0]", 1, _items(2, 3), r"newton_schulz\[0\] has matrix 3 on the ranks \[0, 1\], .* \[0\]"),
        ("newton_schulz[0]", 0, _items(3, 3), r"newton_schulz\[0\] has matrix 3 on the ranks \[0, 0\]"),
        ("newton_schulz[0]", 0, _items(3, 1), r"newton_schulz\[0\] of rank 0 works on matrix 1, .* not in bucket 0"),
        ("newton_schulz[1]", 0, _items(4), r"newton_schulz\[1\] of rank 0 works on matrix 4"),
        ("update[0]", 1, _items(3), r"update\[0\] of rank 1 works on the matrices \[3\] and .* on \[3, 2\]"),
        ("newton_schulz[0]", 1, lambda op: None, r"rank 1 has momentum\[0\] but no newton_schulz\[0\]"),
        ("update[1]", 0, lambda op: None, r"rank 0 has momentum\[1\] but no update\[1\]"),
        ("momentum[1]", 0, lambda op: None, r"rank 0 has gather\[1\] but no momentum\[1\]"),
        ("newton_schulz[0]", 0, _deps(), r"newton_schulz\[0\] of rank 0 does not depend on gather\[0\]"),
        ("update[0]", 0, _deps("newton_schulz[0]"), r"update\[0\] of rank 0 does not depend on scatter\[0\]"),
        (
            "newton_schulz[1]",
            0,
            _deps("gather[1]", "gather[0]"),
            r"newton_schulz\[1\] of rank 0 depends on gather\[0\], whose result is for newton_schulz\[0\] alone",
        ),
        (
            "update[1]",
            1,
            _deps("scatter[1]", "scatter[0]"),
            r"update\[1\] of rank 1 depends on scatter\[0\], whose result is for update\[0\] alone",
        ),
        ("update[1]", 1, lambda op: replace(op, key="0"), r"update\[0\] of rank 1"),
    ],
)
def test_a_broken_step_is_refused(
    plan: MuonPlan, name: str, rank: int, change: Callable[[Op], Op | None], message: str
) -> None:
    ops = [change(op) if op.name == name else op for op in plan.program[rank]]
    program = {**plan.program, rank: [op for op in ops if op is not None]}
    with pytest.raises(ValueError, match=message):
        validate_step(program, plan.owners)
    with pytest.raises(ValueError, match=r"rank|matrix"):
        check_step(program, [plan])


def test_a_matrix_without_bucket_or_owner_or_in_two_is_refused(plan: MuonPlan) -> None:
    def changed(match: Callable[[Op], bool], items: tuple[int, ...]) -> Program:
        return {
            rank: [replace(op, items=items) if match(op) else op for op in ops] for rank, ops in plan.program.items()
        }

    idle = changed(lambda op: op.kind == "newton_schulz", ())
    twice = changed(lambda op: op.key == "1", (3, 2))
    for program, owners, message in (
        (plan.program, (*plan.owners, (0,)), "matrix 4 is in no bucket"),
        (plan.program, plan.owners[:3], r"momentum\[0\] of rank 0 works on matrix 3, but there are 3 matrices"),
        (idle, [()] * 4, r"newton_schulz\[1\] has matrix 0 on the ranks \[\].*; each matrix needs an owner"),
        (twice, plan.owners, r"momentum\[1\] of rank 0 works on matrix 3, which bucket 0 has too"),
    ):
        with pytest.raises(ValueError, match=message):
            validate_step(program, owners)


def test_100_000_ops_are_checked_in_about_a_second() -> None:
    plan = plan_of(sharded([128] * 20_000, 64))
    assert sum(map(len, plan.program.values())) > 100_000
    started = time.process_time()
    check_step(plan.program, [plan])
    # 0.9 to 1.3 seconds of one core; a check that compares pairs of ops takes minutes.
    assert time.process_time() - started < 5
