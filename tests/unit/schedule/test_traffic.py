"""Where matrices lie, and what travels: against a count of every single piece, and against the floor."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_muon.schedule.matrix_shards import MatrixSpec, sharded_matrices
from lightning_muon.schedule.muon import plan_step
from lightning_muon.schedule.traffic import RankTraffic, count_elements, server_of, traffic, traffic_floor
from tests.unit.schedule.specs import grid, sharded


def _spec(name: str, numel: int, *held: int) -> MatrixSpec:
    return MatrixSpec(name=name, numel=numel, flops=1, held=held)


def test_matrices_that_lie_alike_share_one_object() -> None:
    where = sharded_matrices([_spec("a", 4, 2, 2), _spec("b", 5, 3, 2), _spec("c", 4, 2, 2)], [0, 0])
    assert where.shards[0] is where.shards[2] is not where.shards[1]
    assert where.shards[1].by_replica == {0: [(0, 3), (1, 2)]}
    (shards,) = sharded_matrices([_spec("a", 5, 5, 0, 2, 3)], [0, 0, 1, 1]).shards
    assert (shards.by_replica, shards.replica_numel) == ({0: [(0, 5)], 1: [(2, 2), (3, 3)]}, {0: 5, 1: 5})


def test_a_sole_holder_has_all_and_no_other_rank_has_any() -> None:
    specs = [_spec("split", 4, 2, 2), _spec("alone", 4, 0, 4), _spec("empty", 0, 0, 0)]
    assert sharded_matrices(specs, [0, 0]).sole_holders() == [None, 1, 0]
    # The first rank of each replica has all of it, so two ranks do; an expert may be in one replica only.
    specs = [_spec("twice", 9, 9, 9), _spec("expert", 9, 0, 9)]
    assert sharded_matrices(specs, [0, 1]).sole_holders() == [None, 1]


@pytest.mark.parametrize(
    ("held", "replica_of"), [((2, 3), (0, 0)), ((4, 4), (0, 0)), ((2, 0), (0, 0)), ((2, 2, 0, 0), (0, 0, 1, 1))]
)
def test_replicas_must_hold_all_of_a_matrix(held: tuple[int, ...], replica_of: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"must hold all 4 elements of w together, but they hold \{0: \d\}"):
        sharded_matrices([_spec("w", 4, *held)], replica_of)


def test_updates_come_from_oneself_the_replica_or_the_first() -> None:
    replica_of = [0, 0, 1, 1, 2, 2]
    assert [server_of((1, 2), rank, replica_of) for rank in (2, 0, 3, 5)] == [2, 1, 2, 1]


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
def test_counts_are_those_of_all_pieces(numels: list[int], mesh: tuple[int, int], data: st.DataObject) -> None:
    num_ranks = mesh[0] * mesh[1]
    specs, replica_of = sharded(numels, num_ranks, mesh[0]), grid(*mesh)
    subsets = st.sets(st.integers(0, num_ranks - 1), min_size=1)
    owners = {matrix: tuple(sorted(data.draw(subsets))) for matrix in range(len(numels))}
    where = sharded_matrices(specs, replica_of)
    assert _plain(count_elements(owners, where)) == _piece_by_piece(owners, specs, replica_of)


def test_a_shared_tuple_of_owners_counts_like_several() -> None:
    where = sharded_matrices(sharded([6, 6, 9], 3), [0] * 3)
    shared = count_elements(dict.fromkeys(range(3), (0, 1, 2)), where)
    assert shared == count_elements({matrix: tuple(range(3)) for matrix in range(3)}, where)
    assert shared[0].gather_sent == (2 * (2 + 2 + 3), 0)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=20),
    st.sampled_from([(1, 2), (1, 5), (2, 2), (3, 2), (4, 1)]),
    st.sampled_from(["lpt", "round_robin"]),
)
def test_one_owner_per_matrix_moves_just_the_floor(numels: list[int], mesh: tuple[int, int], strategy: str) -> None:
    num_ranks = mesh[0] * mesh[1]
    specs, replica_of = sharded(numels, num_ranks, mesh[0]), grid(*mesh)
    plan = plan_step(
        specs,
        num_ranks=num_ranks,
        itemsize=2,
        chunk_bytes=100,
        strategy=strategy,  # type: ignore[arg-type]
        replica_of=replica_of,
    )
    ranks = traffic(plan.owners, specs, itemsize=2, replica_of=replica_of)
    floor = traffic_floor(plan.owners, specs, itemsize=2, replica_of=replica_of)
    for axis in (0, 1):
        assert sum(each.gather_sent[axis] for each in ranks) == floor.gather[axis]
        assert sum(each.gather_received[axis] for each in ranks) == floor.gather[axis]
        assert sum(each.scatter_sent[axis] for each in ranks) == floor.scatter[axis]
        assert sum(each.scatter_received[axis] for each in ranks) == floor.scatter[axis]
    travelling = sum(spec.numel for spec, owners in zip(specs, plan.owners, strict=True) if _travels(spec, owners))
    assert floor.scatter[1] == (mesh[0] - 1) * travelling * 2
    assert [each.held for each in ranks] == [2 * sum(spec.held[rank] for spec in specs) for rank in range(num_ranks)]


def _travels(spec: MatrixSpec, owners: tuple[int, ...]) -> bool:
    return any(held for rank, held in enumerate(spec.held) if rank not in owners)


def test_all_ranks_as_owners_gather_more_and_scatter_nothing() -> None:
    specs = sharded([12, 8, 20], 4)
    plan = plan_step(specs, num_ranks=4, itemsize=2, chunk_bytes=100, strategy="redundant")
    ranks = traffic(plan.owners, specs, itemsize=2, replica_of=[0] * 4)
    assert [each.gather_received[0] for each in ranks] == [2 * 40 * 3 // 4] * 4
    assert all(each.scatter_sent == (0, 0) for each in ranks)
    # One owner would do with a quarter of it in each direction.
    floor = traffic_floor(plan.owners, specs, itemsize=2, replica_of=[0] * 4)
    assert floor.gather[0] * 4 == sum(each.gather_sent[0] for each in ranks)


def test_what_lies_on_one_rank_does_not_travel() -> None:
    specs = [_spec("expert", 9, 0, 9)]
    owners = plan_step(specs, num_ranks=2, itemsize=2, chunk_bytes=100).owners
    assert traffic_floor(owners, specs, itemsize=2, replica_of=[0, 0]).gather == (0, 0)
    ranks = traffic(owners, specs, itemsize=2, replica_of=[0, 0])
    assert all(each.gather_sent == each.scatter_sent == (0, 0) for each in ranks)
