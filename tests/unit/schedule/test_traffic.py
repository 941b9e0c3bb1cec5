"""Where matrices lie, and what travels: against a count of every single piece, and against the floor."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_muon.schedule.matrix_shards import MatrixSpec, sharded_matrices
from lightning_muon.schedule.traffic import Traffic, count_elements, server_of, traffic_floor
from tests.unit.schedule.specs import grid, plan_of, sharded


def _spec(name: str, numel: int, *held: int) -> MatrixSpec:
    return MatrixSpec(name=name, numel=numel, flops=1, held=held)


def test_replicas_and_their_ranks_are_found() -> None:
    (shards,) = sharded_matrices([_spec("a", 5, 5, 0, 2, 3)], [0, 0, 1, 1]).shards
    assert (shards.by_replica, shards.replica_numel) == ({0: [(0, 5)], 1: [(2, 2), (3, 3)]}, {0: 5, 1: 5})


def test_a_sole_holder_has_all_and_no_other_rank_has_any() -> None:
    def holders(specs: list[MatrixSpec], replica_of: list[int]) -> list[int | None]:
        return [each.sole_holder for each in sharded_matrices(specs, replica_of).shards]

    specs = [_spec("split", 4, 2, 2), _spec("alone", 4, 0, 4), _spec("empty", 0, 0, 0)]
    assert holders(specs, [0, 0]) == [None, 1, 0]
    # The first rank of each replica has all of it, so two ranks do; an expert may be in one replica only.
    assert holders([_spec("twice", 9, 9, 9), _spec("expert", 9, 0, 9)], [0, 1]) == [None, 1]


@pytest.mark.parametrize(
    ("held", "replica_of", "message"),
    [
        *(
            (held, replica_of, r"must hold all 4 elements of w together, but they hold \{0: \d\}")
            for held, replica_of in [((2, 3), (0, 0)), ((4, 4), (0, 0)), ((2, 0), (0, 0)), ((2, 2, 0, 0), (0, 0, 1, 1))]
        ),
        ((2, 2), (0, 0, 0), "w says what 2 ranks hold, but the exchange group has 3 ranks"),
    ],
)
def test_replicas_must_hold_all_of_a_matrix(held: tuple[int, ...], replica_of: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sharded_matrices([_spec("w", 4, *held)], replica_of)


def test_updates_come_from_oneself_the_replica_or_the_first() -> None:
    replica_of = [0, 0, 1, 1, 2, 2]
    assert [server_of((1, 2), rank, replica_of) for rank in (2, 0, 3, 5)] == [2, 1, 2, 1]


def _piece_by_piece(owners: dict[int, tuple[int, ...]], specs: list[MatrixSpec], replica_of: list[int]) -> Traffic:
    held, owned, gather_sent, gather_received = ([0] * len(replica_of) for _ in range(4))
    sent, received = (([0] * len(replica_of), [0] * len(replica_of)) for _ in range(2))
    for matrix, chosen in owners.items():
        for rank, elements in enumerate(specs[matrix].held):
            held[rank] += elements
            owned[rank] += specs[matrix].numel if rank in chosen else 0
            for owner in chosen:
                if owner != rank and replica_of[owner] == replica_of[rank]:
                    gather_sent[rank] += elements
                    gather_received[owner] += elements
            server = server_of(chosen, rank, replica_of)
            if server != rank:
                axis = int(replica_of[server] != replica_of[rank])
                sent[axis][server] += elements
                received[axis][rank] += elements
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
    st.lists(st.integers(0, 40), min_size=1, max_size=12),
    st.sampled_from([(1, 1), (1, 4), (2, 2), (3, 2), (2, 3), (4, 1)]),
    st.data(),
)
def test_counts_are_those_of_all_pieces(numels: list[int], mesh: tuple[int, int], data: st.DataObject) -> None:
    num_ranks = mesh[0] * mesh[1]
    specs, replica_of = sharded(numels, num_ranks, mesh[0]), grid(*mesh)
    subsets = st.sets(st.integers(0, num_ranks - 1), min_size=1)
    owners = {matrix: tuple(sorted(data.draw(subsets))) for matrix in range(len(numels))}
    assert count_elements(owners, sharded_matrices(specs, replica_of)) == _piece_by_piece(owners, specs, replica_of)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=20),
    st.sampled_from([(1, 2), (1, 5), (2, 2), (3, 2), (4, 1)]),
    st.sampled_from(["lpt", "round_robin"]),
)
def test_one_owner_per_matrix_moves_just_the_floor(numels: list[int], mesh: tuple[int, int], strategy: str) -> None:
    matrices = sharded_matrices(sharded(numels, mesh[0] * mesh[1], mesh[0]), grid(*mesh))
    owners = plan_of(list(matrices.specs), matrices.replica_of, chunk_bytes=100, strategy=strategy).owners
    found = count_elements(dict(enumerate(owners)), matrices)
    within, between = traffic_floor(owners, matrices)
    assert sum(found.gather_sent) == sum(found.gather_received) == within
    assert [sum(axis) for axis in found.scatter_sent] == [within, between]
    assert [sum(axis) for axis in found.scatter_received] == [within, between]
