"""Bytes of a plan against the floor."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_muon.schedule.muon import MatrixSpec, plan_step
from lightning_muon.schedule.traffic import traffic, traffic_floor
from tests.unit.schedule.specs import grid, replicated, sharded


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
    ranks = traffic(plan, specs, itemsize=2, replica_of=replica_of)
    floor = traffic_floor(plan, specs, itemsize=2, replica_of=replica_of)
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


def test_each_rank_sends_its_pieces_of_what_it_does_not_own_once() -> None:
    specs = sharded([12, 8, 20], 4)
    plan = plan_step(specs, num_ranks=4, itemsize=2, chunk_bytes=100)
    for rank, each in enumerate(traffic(plan, specs, itemsize=2)):
        own = sum(spec.held[rank] for spec, owners in zip(specs, plan.owners, strict=True) if owners == (rank,))
        assert each.gather_sent == each.scatter_received == (2 * (10 - own), 0)


def test_the_redundant_baseline_moves_more_one_way_and_nothing_back() -> None:
    specs = sharded([12, 8, 20], 4)
    plan = plan_step(specs, num_ranks=4, itemsize=2, chunk_bytes=100, strategy="redundant")
    ranks = traffic(plan, specs, itemsize=2)
    assert [each.gather_received[0] for each in ranks] == [2 * 40 * 3 // 4] * 4
    assert all(each.scatter_sent == (0, 0) for each in ranks)
    # One owner would do with a quarter of it in each direction.
    assert traffic_floor(plan, specs, itemsize=2).gather[0] * 4 == sum(each.gather_sent[0] for each in ranks)


def test_what_lies_on_one_rank_does_not_travel() -> None:
    specs = [MatrixSpec(name="expert", numel=9, flops=1, held=(0, 9))]
    plan = plan_step(specs, num_ranks=2, itemsize=2, chunk_bytes=100)
    assert traffic_floor(plan, specs, itemsize=2).gather == (0, 0)
    assert all(each.gather_sent == each.scatter_sent == (0, 0) for each in traffic(plan, specs, itemsize=2))


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_replicated_updates_are_told_to_every_other_rank(num_ranks: int) -> None:
    specs = replicated([7, 9], num_ranks)
    plan = plan_step(specs, num_ranks=num_ranks, itemsize=4, chunk_bytes=100, replica_of=range(num_ranks))
    floor = traffic_floor(plan, specs, itemsize=4, replica_of=range(num_ranks))
    assert floor.gather == (0, 0)
    assert floor.scatter == (0, (num_ranks - 1) * 16 * 4)
