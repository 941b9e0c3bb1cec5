"""Elements that travel, against a count of every single piece."""

from __future__ import annotations

from dataclasses import asdict

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_muon.schedule.counts import RankTraffic, count_elements, server_of
from lightning_muon.schedule.holdings import MatrixSpec, holdings
from tests.unit.schedule.specs import grid, replicated, sharded


def test_a_rank_is_served_by_itself_then_by_its_replica_then_by_the_first_owner() -> None:
    replica_of = [0, 0, 1, 1, 2, 2]
    assert server_of((1, 2), 2, replica_of) == 2
    assert server_of((1, 2), 0, replica_of) == 1
    assert server_of((1, 2), 3, replica_of) == 2
    assert server_of((1, 2), 5, replica_of) == 1


def _piece_by_piece(owners: dict[int, tuple[int, ...]], specs: list[MatrixSpec], replica_of: list[int]) -> list:
    """Every transfer of every piece on its own, as the docstring of the module has it."""
    names = ("gather_sent", "gather_received", "scatter_sent", "scatter_received")
    counts = [{name: [0, 0] for name in names} | {"held": 0, "owned": 0} for _ in replica_of]
    for matrix, chosen in owners.items():
        held = specs[matrix].held
        for rank, elements in enumerate(held):
            counts[rank]["held"] += elements
            counts[rank]["owned"] += specs[matrix].numel if rank in chosen else 0
            for owner in chosen:
                if owner != rank and replica_of[owner] == replica_of[rank]:
                    counts[rank]["gather_sent"][0] += elements
                    counts[owner]["gather_received"][0] += elements
            server = server_of(chosen, rank, replica_of)
            if server != rank:
                axis = int(replica_of[server] != replica_of[rank])
                counts[server]["scatter_sent"][axis] += elements
                counts[rank]["scatter_received"][axis] += elements
    return counts


def _plain(counts: list[RankTraffic]) -> list[dict[str, object]]:
    return [{k: list(v) if isinstance(v, tuple) else v for k, v in asdict(count).items()} for count in counts]


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=12),
    st.sampled_from([(1, 1), (1, 4), (2, 2), (3, 2), (2, 3), (4, 1)]),
    st.data(),
)
def test_the_counts_are_those_of_all_pieces(numels: list[int], mesh: tuple[int, int], data: st.DataObject) -> None:
    num_ranks = mesh[0] * mesh[1]
    specs, replica_of = sharded(numels, num_ranks, mesh[0]), grid(*mesh)
    subsets = st.sets(st.integers(0, num_ranks - 1), min_size=1)
    owners = {matrix: tuple(sorted(data.draw(subsets))) for matrix in range(len(numels))}
    where = holdings(specs, replica_of)
    assert _plain(count_elements(owners, where)) == _piece_by_piece(owners, specs, replica_of)


def test_matrices_that_share_a_tuple_of_owners_are_counted_together() -> None:
    specs = sharded([6, 6, 9], 3)
    everyone = (0, 1, 2)
    shared = count_elements(dict.fromkeys(range(3), everyone), holdings(specs, [0] * 3))
    apart = count_elements({matrix: tuple(range(3)) for matrix in range(3)}, holdings(specs, [0] * 3))
    assert shared == apart
    assert shared[0].gather_sent == (2 * (2 + 2 + 3), 0)


def test_replicated_matrices_travel_between_replicas_only() -> None:
    counts = count_elements({0: (1,)}, holdings(replicated([10], 3), [0, 1, 2]))
    assert [each.scatter_sent for each in counts] == [(0, 0), (0, 20), (0, 0)]
    assert [each.scatter_received for each in counts] == [(0, 10), (0, 0), (0, 10)]
    assert all(each.gather_sent == each.gather_received == (0, 0) for each in counts)
