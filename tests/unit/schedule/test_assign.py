"""Owners: balance, ties, memory of earlier chunks, and what stays where it lies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from lightning_muon.schedule.assign import assign_owners, longest_first
from lightning_muon.schedule.program import UNASSIGNED, Op, Program


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=7), st.integers(1, 3))
def test_the_largest_load_is_within_grahams_bound_of_the_optimum(costs: list[int], num_ranks: int) -> None:
    loads = [(0, 0)] * num_ranks
    owners = longest_first(costs, costs, loads, taken=range(len(costs)))
    assert [load for load, _ in loads] == _loads(costs, [owners[job] for job in range(len(costs))], num_ranks)
    optimum = min(max(_loads(costs, choice, num_ranks)) for choice in product(range(num_ranks), repeat=len(costs)))
    assert max(load for load, _ in loads) * 3 * num_ranks <= (4 * num_ranks - 1) * optimum


def _loads(costs: list[int], owners: Sequence[int], num_ranks: int) -> list[int]:
    return [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(num_ranks)]


def test_bytes_break_ties_and_loads_are_remembered() -> None:
    loads = [(5, 100), (5, 10), (6, 0)]
    assert longest_first([3], [7], loads, taken=[0]) == {0: 1}
    assert loads == [(5, 100), (8, 17), (6, 0)]
    assert longest_first([1, 2], [1, 1], loads, taken=[1, 0]) == {1: 0, 0: 2}


def _chunks(*items: tuple[int, ...]) -> Program:
    return {
        UNASSIGNED: [
            Op(kind="newton_schulz", key=str(key), rank=UNASSIGNED, items=each) for key, each in enumerate(items)
        ]
    }


def _items(program: Program) -> list[list[tuple[int, ...]]]:
    return [[op.items for op in program[rank]] for rank in sorted(program)]


def test_each_rank_gets_its_part_of_each_chunk_in_the_order_of_the_chunk() -> None:
    program = assign_owners(
        _chunks((4, 3, 2), (1, 0)),
        costs=[1, 10, 4, 5, 2],
        sizes=[1] * 5,
        sole_holders=[None] * 5,
        loads=[(0, 0), (0, 0)],
        strategy="lpt",
    )
    # 5 | 4 + 2, then 10 to the lighter rank 0 and 1 to rank 1: 15 | 7. To even out, 5 goes to rank 1 and 1 to rank 0.
    assert _items(program) == [[(1, 0)], [(4, 3, 2)]]
    assert [[op.cost for op in program[rank]] for rank in (0, 1)] == [[11], [11]]
    assert {op.rank for op in program[1]} == {1}


def test_only_the_last_chunks_of_longest_first_are_evened_out() -> None:
    items = tuple((2 * chunk + 1, 2 * chunk) for chunk in range(6))
    arguments = {"sizes": [1] * 12, "sole_holders": [None] * 12, "loads": [(0, 0), (30, 0)]}
    costs = [4, 3] * 6
    program = assign_owners(_chunks(*items), costs=costs, strategy="lpt", **arguments)
    # All goes to rank 0 until it has as much as rank 1; round robin takes turns whatever the load.
    assert [op.items for op in program[0]][:2] == [(1, 0), (3, 2)]
    assert abs(sum(op.cost for op in program[0]) - sum(op.cost for op in program[1]) - 30) <= 1
    turns = assign_owners(_chunks(*items), costs=costs, strategy="round_robin", **arguments)
    assert _items(turns) == [[(first,) for first, _ in items], [(second,) for _, second in items]]


def test_what_lies_on_one_rank_counts_before_all_else_is_assigned() -> None:
    program = assign_owners(
        _chunks((0,), (2, 1)),
        costs=[6, 5, 5],
        sizes=[1] * 3,
        sole_holders=[1, None, None],
        loads=[(0, 0), (0, 0)],
        strategy="lpt",
    )
    # Rank 1 starts with 6, so that rank 0 is the lighter one even with 5.
    assert _items(program) == [[(2, 1)], [(0,)]]


def test_redundant_ranks_do_everything_but_what_lies_elsewhere() -> None:
    program = assign_owners(
        _chunks((0,), (2, 1)),
        costs=[6, 5, 5],
        sizes=[1] * 3,
        sole_holders=[1, None, None],
        loads=[(0, 0), (0, 0)],
        strategy="redundant",
    )
    assert _items(program) == [[(2, 1)], [(0,), (2, 1)]]
