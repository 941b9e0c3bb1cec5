"""Where matrices lie, and what travels: against a count of every single piece, and against the fewest elements."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_muon.schedule.traffic import MatrixShards, MatrixSpec, Traffic, count_elements
from tests.unit.schedule.specs import grid, plan_of, sharded


def test_replicas_and_sole_holders_are_found() -> None:
    assert MatrixShards([5, 0, 2, 3], [0, 0, 1, 1]).by_replica == {0: [(0, 5)], 1: [(2, 2), (3, 3)]}
    held = [(2, 2), (0, 4), (0, 0)]
    assert [MatrixShards(each, [0, 0]).sole_holder for each in held] == [None, 1, 0]
    # The first rank of each replica has all of it, so two ranks do; an expert may be in one replica only.
    assert [MatrixShards(each, [0, 1]).sole_holder for each in ((9, 9), (0, 9))] == [None, 1]


def _piece_by_piece(owners: dict[int, tuple[int, ...]], specs: list[MatrixSpec], replica_of: list[int]) -> Traffic:
    held, owned, gather_sent, gather_received = ([0] * len(replica_of) for _ in range(4))
    sent, received = (([0] * len(replica_of), [0] * len(replica_of)) for _ in range(2))
    for matrix, chosen in owners.items():
        for rank, elements in enumerate(specs[matrix].shards.held):
            held[rank] += elements
            owned[rank] += specs[matrix].numel if rank in chosen else 0
            for owner in chosen:
                if owner != rank and replica_of[owner] == replica_of[rank]:
                    gather_sent[rank] += elements
                    gather_received[owner] += elements
            if rank not in chosen:
                axis = int(replica_of[chosen[0]] != replica_of[rank])
                sent[axis][chosen[0]] += elements
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
    ranks = range(num_ranks)
    chosen = st.sampled_from([*((rank,) for rank in ranks), tuple(ranks)])
    owners = {matrix: data.draw(chosen) for matrix in range(len(numels))}
    assert count_elements(owners, specs) == _piece_by_piece(owners, specs, replica_of)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=20),
    st.sampled_from([(1, 2), (1, 5), (2, 2), (3, 2), (4, 1)]),
    st.sampled_from(["lpt", "round_robin"]),
)
def test_one_owner_moves_no_more_than_it_must(numels: list[int], mesh: tuple[int, int], strategy: str) -> None:
    specs = sharded(numels, mesh[0] * mesh[1], mesh[0])
    owners = plan_of(specs, chunk_bytes=100, strategy=strategy).owners
    found = count_elements(dict(enumerate(owners)), specs)
    within = sum(spec.numel - spec.shards.held[owner] for spec, (owner,) in zip(specs, owners, strict=True))
    between = (mesh[0] - 1) * sum(numels)
    assert sum(found.gather_sent) == sum(found.gather_received) == within
    assert [sum(axis) for axis in found.scatter_sent] == [within, between]
    assert [sum(axis) for axis in found.scatter_received] == [within, between]
