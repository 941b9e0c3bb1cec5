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


def test_ops_that_wait_for_each_other_are_named_with_what_they_wait_for() -> None:
    program = {0: [compute("a", 1, "b[0]"), compute("b", 1)]}
    with pytest.raises(DeadlockError, match=r"2 ops can never begin: a\[0\] of rank 0 waits for b\[0\]"):
        list(build_graph(program).order())
    loop = {0: [compute("a", 1, "b[0]"), collective("b", 1, "a[0]")]}
    with pytest.raises(DeadlockError, match=r"a\[0\] of rank 0 waits for b\[0\]; b\[0\] of rank 0 waits for a\[0\]"):
        list(build_graph(loop).order())


def test_communications_in_different_order_are_a_deadlock() -> None:
    ranks = (0, 1)
    program = {
        0: [collective("gather", 1, rank=0, group=ranks), collective("scatter", 1, rank=0, group=ranks)],
        1: [collective("scatter", 1, rank=1, group=ranks), collective("gather", 1, rank=1, group=ranks)],
    }
    with pytest.raises(DeadlockError, match=r"gather\[0\] of rank 0 waits for rank 1 \(at scatter\[0\]\)"):
        list(build_graph(program).order())


def test_a_rank_without_the_op_is_named() -> None:
    program = {0: [collective("gather", 1, group=(0, 1, 2))], 1: [collective("gather", 1, rank=1, group=(0, 1, 2))]}
    with pytest.raises(DeadlockError, match=r"gather\[0\] of rank 0 waits for rank 2 \(which has no such op\)"):
        list(build_graph(program).order())


def test_long_lists_of_waiting_ops_are_cut() -> None:
    program = {rank: [collective("gather", 1, rank=rank, group=tuple(range(99)))] for rank in range(20)}
    with pytest.raises(DeadlockError, match=r"20 ops can never begin: .*; and 12 more"):
        list(build_graph(program).order())


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ([compute("a", 1), compute("a", 2)], r"a\[0\] of rank 0 is there twice"),
        ([compute("a", 1, "gone[0]")], r"a\[0\] of rank 0 depends on gone\[0\], which this rank does not have"),
        ([collective("all", 1, group=(1, 2))], r"all\[0\] of rank 0 is a communication of ranks \(1, 2\), to which"),
        ([collective("all", 1, group=(0, 0))], r"all\[0\] of rank 0 has a rank twice in its group \(0, 0\)"),
    ],
)
def test_wrong_names_and_groups_are_errors(ops: list[Op], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_graph({0: ops})


def test_a_key_for_both_directions_is_an_error() -> None:
    program = {0: [send("x", 0, 1), recv("x", 1, 0)], 1: [recv("x", 0, 1), send("x", 1, 0)]}
    with pytest.raises(
        ValueError, match=r"recv\[x\] of rank 1 is not the only op|send\[x\] of rank 1 is not the only op"
    ):
        build_graph(program)
