"""Exchanges within chunks: they end, keep chunks whole and help the busiest rank."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_muon.schedule import exchange
from lightning_muon.schedule.exchange import even_out


def _loads(chunks: list[dict[int, int]], costs: list[int], num_ranks: int) -> list[tuple[int, int]]:
    pairs = [pair for chunk in chunks for pair in chunk.items()]
    totals = [sum(costs[matrix] for matrix, owner in pairs if owner == rank) for rank in range(num_ranks)]
    return [(total, 2 * total) for total in totals]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=8), min_size=1, max_size=4), st.integers(1, 4), st.data()
)
def test_the_busiest_rank_never_gets_busier_and_no_exchange_is_left(
    chunk_costs: list[list[int]], num_ranks: int, data: st.DataObject
) -> None:
    costs = [cost for chunk in chunk_costs for cost in chunk]
    matrices = iter(range(len(costs)))
    chunks = [{next(matrices): data.draw(st.integers(0, num_ranks - 1)) for _ in chunk} for chunk in chunk_costs]
    members = [set(chunk) for chunk in chunks]
    loads = _loads(chunks, costs, num_ranks)
    most = max(loads)
    even_out(chunks, costs, [2 * cost for cost in costs], loads)
    assert [set(chunk) for chunk in chunks] == members
    assert loads == _loads(chunks, costs, num_ranks)
    assert max(loads) <= most
    busiest = max(range(num_ranks), key=lambda rank: loads[rank][0])
    for chunk in chunks:
        for matrix in (matrix for matrix, owner in chunk.items() if owner == busiest):
            assert all(costs[matrix] >= loads[busiest][0] - load for load, _ in loads)
            for other, owner in chunk.items():
                relief = costs[matrix] - costs[other]
                assert relief <= 0 or relief >= loads[busiest][0] - loads[owner][0]


def test_the_exchange_that_helps_most_is_made() -> None:
    # 10 + 4 | 6 | 3: exchanging 10 for 6 leaves 10, moving 4 leaves 10 too and comes later; 10 for 3 leaves 10.
    chunks = [{0: 0, 1: 1}, {2: 0, 3: 2}]
    loads = [(14, 14), (6, 6), (3, 3)]
    even_out(chunks, [10, 6, 4, 3], [10, 6, 4, 3], loads)
    assert max(loads) == (10, 10)
    assert sum(load for load, _ in loads) == 23


def test_equal_loads_stay_as_they_are() -> None:
    chunks = [{0: 0, 1: 1}]
    even_out(chunks, [5, 5], [1, 1], loads := [(5, 1), (5, 1)])
    assert chunks == [{0: 0, 1: 1}]
    assert loads == [(5, 1), (5, 1)]


def test_so_many_comparisons_are_made_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MOST_COMPARISONS", 1)
    chunks = [dict.fromkeys(range(8), 0)]
    even_out(chunks, [1] * 8, [1] * 8, [(8, 8), (0, 0)])
    assert list(chunks[0].values()).count(1) == 1
