"""What waits for what, and what an impossible program is told."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from lightning_muon.schedule.graph import DeadlockError, build_graph
from lightning_muon.schedule.program import Op, Program
from tests.unit.schedule.programs import collective, compute, programs, recv, send


@settings(deadline=None)
@given(programs())
def test_every_node_comes_behind_all_that_it_waits_for(program: Program) -> None:
    graph = build_graph(program)
    place = {node: index for index, node in enumerate(graph.order())}
    assert len(place) == len(graph.nodes)
    for op, before in enumerate(graph.waits):
        assert all(place[graph.node_of[other]] < place[graph.node_of[op]] for other in before)


def test_the_ops_of_a_communication_are_one_node() -> None:
    graph = build_graph(
        {
            0: [collective("gather", 1, rank=0, group=(0, 1)), send("x", 0, 1)],
            1: [collective("gather", 1, rank=1, group=(1, 0)), recv("x", 0, 1)],
        }
    )
    assert graph.node_of == [0, 1, 0, 1]


def _pair(first: str, second: str) -> Program:
    return {
        rank: [collective(kind, 1, rank=rank, group=(0, 1)) for kind in kinds]
        for rank, kinds in enumerate([(first, second), (second, first)])
    }


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
        (_pair("gather", "scatter"), r"gather\[0\] of rank 0 waits for rank 1 \(at scatter\[0\]\)"),
        (
            {rank: [collective("gather", 1, rank=rank, group=(0, 1, 2))] for rank in (0, 1)},
            r"gather\[0\] of rank 0 waits for rank 2 \(which has no such op\)",
        ),
        (
            {rank: [collective("gather", 1, rank=rank, group=tuple(range(99)))] for rank in range(20)},
            "20 ops can never begin: .*; and 12 more",
        ),
    ],
    ids=["chain", "cycle", "other order", "missing rank", "many"],
)
def test_a_deadlock_names_who_waits_for_what(program: Program, message: str) -> None:
    with pytest.raises(DeadlockError, match=message):
        list(build_graph(program).order())


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ([compute("a", 1), compute("a", 2)], r"a\[0\] of rank 0 is there twice"),
        ([compute("a", 1, "gone[0]")], r"a\[0\] of rank 0 depends on gone\[0\], which this rank does not have"),
        ([collective("all", 1, group=(1, 2))], r"all\[0\] of rank 0 is a communication of ranks \(1, 2\), to which"),
        ([collective("all", 1, group=(0, 0))], r"all\[0\] of rank 0 has a rank twice in its group \(0, 0\)"),
        ([collective("send", 1, group=(0, 1, 2))], r"send\[0\] of rank 0 has the ranks \(0, 1, 2\); a message has two"),
        ([send("x", 0, 1), recv("x", 1, 0)], r"recv\[x\] of rank 0 is no message with send\[x\] of rank 0"),
    ],
)
def test_wrong_names_and_groups_are_errors(ops: list[Op], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_graph({0: ops})


def test_two_sends_do_not_meet() -> None:
    with pytest.raises(ValueError, match=r"send\[a\] of rank 1 is no message with send\[a\] of rank 0"):
        build_graph({0: [send("a", 0, 1)], 1: [send("a", 1, 0)]})
