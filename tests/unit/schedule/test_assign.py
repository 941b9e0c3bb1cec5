"""Longest-first assignment: balance, ties and memory of earlier chunks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from lightning_muon.schedule.assign import longest_first


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
