"""The plan of a step: buckets, owners and what travels, against a count of every piece."""

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_muon.params.layout import Matrix
from lightning_muon.schedule.exchange import Traffic, count_elements, fill_buckets, longest_first
from tests.unit.schedule.specs import grid, sharded


@pytest.mark.parametrize(
    ("sizes", "holders", "num_owners", "bucket_bytes", "expected"),
    [
        # A bucket is closed when every owner has a matrix and its bytes are reached.
        ([10] * 7, [None] * 7, 2, 15, [(6, 5, 4), (3, 2, 1), (0,)]),
        # Where every rank owns all, a bucket has at most its bytes or one matrix.
        ([10, 10, 99, 10], [None] * 4, 1, 20, [(3,), (2,), (1, 0)]),
        # Matrices on one rank come first, in buckets of their own.
        ([10] * 6, [None, 0, 1, 0, 1, None], 2, 5, [(4, 3), (2, 1), (5, 0)]),
        # Ranks fill their buckets side by side, whatever the order of their matrices.
        ([10] * 6, [0, 0, 0, 1, 1, 1], 2, 10, [(5, 2), (4, 1), (3, 0)]),
    ],
)
def test_buckets_are_filled_from_the_last_matrix(
    sizes: list[int], holders: list[int | None], num_owners: int, bucket_bytes: int, expected: list[tuple[int, ...]]
) -> None:
    assert fill_buckets(sizes, holders, num_owners=num_owners, bucket_bytes=bucket_bytes) == expected


def _piece_by_piece(matrices: list[Matrix], replica_of: list[int]) -> Traffic:
    held, owned, gather_sent, gather_received, *scattered = ([0] * len(replica_of) for _ in range(8))
    sent, received = (scattered[0], scattered[1]), (scattered[2], scattered[3])
    for matrix in matrices:
        owner = matrix.owner
        owned[owner] += matrix.numel
        for rank, piece in matrix.pieces.items():
            held[rank] += piece.numel
            axis = int(replica_of[owner] != replica_of[rank])
            if owner != rank:
                sent[axis][owner] += piece.numel
                received[axis][rank] += piece.numel
            if owner != rank and axis == 0:
                gather_sent[rank] += piece.numel
                gather_received[owner] += piece.numel
    return Traffic(
        held=held,
        owned=owned,
        gather_sent=gather_sent,
        gather_received=gather_received,
        scatter_sent=sent,
        scatter_received=received,
    )


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.sampled_from([(1, 1), (1, 4), (2, 2), (3, 2), (2, 3), (4, 1)]),
    st.data(),
)
def test_counts_are_those_of_all_pieces(numels: list[int], mesh: tuple[int, int], data: st.DataObject) -> None:
    num_ranks = mesh[0] * mesh[1]
    specs, replica_of = sharded(numels, num_ranks, mesh[0]), grid(*mesh)
    for matrix in specs:
        matrix.owner = data.draw(st.integers(0, num_ranks - 1))
    assert count_elements(specs, replica_of) == _piece_by_piece(specs, replica_of)


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
