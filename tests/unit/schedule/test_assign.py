"""Owners: balance, ties, memory of earlier buckets, and what stays where it lies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_muon.schedule import assign as assign_module
from lightning_muon.schedule.assign import assign_owners, even_out, longest_first


def _loads(costs: list[int], owners: Sequence[int], num_ranks: int) -> list[int]:
    return [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(num_ranks)]


@settings(deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=7), st.integers(1, 3))
def test_the_largest_load_is_within_grahams_bound(costs: list[int], num_ranks: int) -> None:
    loads = [(0, 0)] * num_ranks
    owners = longest_first(costs, costs, loads, taken=range(len(costs)))
    assert [load for load, _ in loads] == _loads(costs, [owners[job] for job in range(len(costs))], num_ranks)
    optimum = min(max(_loads(costs, choice, num_ranks)) for choice in product(range(num_ranks), repeat=len(costs)))
    assert max(load for load, _ in loads) * 3 * num_ranks <= (4 * num_ranks - 1) * optimum


def test_bytes_break_ties_and_loads_are_remembered() -> None:
    loads = [(5, 100), (5, 10), (6, 0)]
    assert longest_first([3], [7], loads, taken=[0]) == {0: 1}
    assert loads == [(5, 100), (8, 17), (6, 0)]
    assert longest_first([1, 2], [1, 1], loads, taken=[1, 0]) == {1: 0, 0: 2}


def _assign(buckets: list[tuple[int, ...]], costs: list[int], **options: Any) -> list[tuple[int, ...]]:
    options = {"strategy": "lpt", "sole_holders": [None] * len(costs), "loads": [(0, 0), (0, 0)]} | options
    return assign_owners(buckets, costs=costs, sizes=[1] * len(costs), **options)


def test_later_buckets_even_out_earlier_ones() -> None:
    # 5 | 4 + 2, then 10 to the lighter rank 0 and 1 to rank 1: 15 | 7. To even out, 5 goes to rank 1 and 1 to rank 0.
    assert _assign([(4, 3, 2), (1, 0)], [1, 10, 4, 5, 2]) == [(0,), (0,), (1,), (1,), (1,)]


def test_only_the_last_buckets_of_longest_first_are_evened_out() -> None:
    buckets = [(2 * number + 1, 2 * number) for number in range(6)]
    costs, loads = [4, 3] * 6, [(0, 0), (30, 0)]
    owners = _assign(buckets, costs, loads=loads)
    # All goes to rank 0 until it has as much as rank 1; round robin takes turns whatever the load.
    assert owners[:4] == [(0,)] * 4
    zero, one = _loads(costs, [owner for (owner,) in owners], 2)
    assert abs(zero - one - 30) <= 1
    assert _assign(buckets, costs, loads=loads, strategy="round_robin") == [(1,), (0,)] * 6


@pytest.mark.parametrize(("strategy", "shared"), [("lpt", (0,)), ("round_robin", None), ("redundant", (0, 1))])
def test_what_lies_on_one_rank_stays_and_counts_first(strategy: str, shared: tuple[int, ...] | None) -> None:
    owners = _assign([(0,), (2, 1)], [6, 5, 5], sole_holders=[1, None, None], strategy=strategy)
    # With lpt, rank 1 starts with 6, so that rank 0 is the lighter one even with 5.
    assert owners == [(1,), *([(1,), (0,)] if shared is None else [shared, shared])]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=8), min_size=1, max_size=4), st.integers(1, 4), st.data()
)
def test_the_busiest_gets_less_until_no_exchange_is_left(
    bucket_costs: list[list[int]], num_ranks: int, data: st.DataObject
) -> None:
    costs = [cost for bucket in bucket_costs for cost in bucket]
    matrices = iter(range(len(costs)))
    buckets = [{next(matrices): data.draw(st.integers(0, num_ranks - 1)) for _ in bucket} for bucket in bucket_costs]
    members = [set(bucket) for bucket in buckets]

    def loads_now() -> list[tuple[int, int]]:
        owner_of = {matrix: owner for bucket in buckets for matrix, owner in bucket.items()}
        return [(load, 2 * load) for load in _loads(costs, [owner_of[i] for i in range(len(costs))], num_ranks)]

    loads = loads_now()
    most = max(loads)
    even_out(buckets, costs, [2 * cost for cost in costs], loads)
    assert [set(bucket) for bucket in buckets] == members
    assert loads == loads_now()
    assert max(loads) <= most
    busiest = max(range(num_ranks), key=lambda rank: loads[rank][0])
    for bucket in buckets:
        for matrix in (matrix for matrix, owner in bucket.items() if owner == busiest):
            assert all(costs[matrix] >= loads[busiest][0] - load for load, _ in loads)
            for other, owner in bucket.items():
                relief = costs[matrix] - costs[other]
                assert relief <= 0 or relief >= loads[busiest][0] - loads[owner][0]


def test_so_many_comparisons_are_made_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assign_module, "MOST_COMPARISONS", 1)
    buckets = [dict.fromkeys(range(8), 0)]
    even_out(buckets, [1] * 8, [1] * 8, [(8, 8), (0, 0)])
    assert list(buckets[0].values()).count(1) == 1
