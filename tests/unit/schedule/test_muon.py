"""The plan of a step: who owns what, what travels, and in which chunks."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from lightning_muon.schedule.muon import MatrixSpec, plan_step


def _spec(name: str, numel: int, held: tuple[int, ...], flops: int | None = None) -> MatrixSpec:
    return MatrixSpec(name=name, numel=numel, flops=flops if flops is not None else numel, held=held)


def test_chunks_are_filled_from_the_last_matrix_and_bounded_in_bytes() -> None:
    specs = [_spec(str(index), 10, (5, 5)) for index in range(5)]
    plan = plan_step(specs, num_ranks=2, itemsize=2, chunk_bytes=40)
    assert plan.chunks == ((4, 3), (2, 1), (0,))
    assert plan.resident == ()


def test_a_matrix_above_the_bound_is_a_chunk_of_its_own() -> None:
    specs = [_spec("a", 10, (5, 5)), _spec("big", 1000, (500, 500)), _spec("c", 10, (5, 5))]
    assert plan_step(specs, num_ranks=2, itemsize=4, chunk_bytes=100).chunks == ((2,), (1,), (0,))


def test_a_matrix_on_one_rank_stays_there_and_counts_in_the_balance() -> None:
    specs = [_spec("local", 100, (0, 100)), _spec("first", 60, (30, 30)), _spec("second", 40, (20, 20))]
    plan = plan_step(specs, num_ranks=2, itemsize=4, chunk_bytes=10**6)
    assert plan.resident == ((0,),)
    assert plan.owners == (1, 0, 0)
    assert plan.flops == (100, 100)


def test_a_replicated_matrix_travels_but_one_rank_alone_does_not() -> None:
    assert plan_step([_spec("w", 6, (6, 6))], num_ranks=2, itemsize=4, chunk_bytes=100).chunks == ((0,),)
    assert plan_step([_spec("w", 6, (6,))], num_ranks=1, itemsize=4, chunk_bytes=100).chunks == ()


@given(st.lists(st.integers(1, 500), min_size=1, max_size=30), st.integers(2, 5), st.integers(1, 2000))
def test_every_matrix_has_one_owner_and_travels_at_most_once(
    sizes: list[int], num_ranks: int, chunk_bytes: int
) -> None:
    specs = [_spec(str(i), size * num_ranks, (size,) * num_ranks) for i, size in enumerate(sizes)]
    plan = plan_step(specs, num_ranks=num_ranks, itemsize=2, chunk_bytes=chunk_bytes)
    assert sorted(job for chunk in plan.chunks for job in chunk) == list(range(len(sizes)))
    assert all(0 <= owner < num_ranks for owner in plan.owners)
    assert sum(plan.flops) == sum(spec.flops for spec in specs)
    for chunk in plan.chunks:
        assert len(chunk) == 1 or sum(specs[job].numel * 2 for job in chunk) <= chunk_bytes


def test_the_fingerprint_tells_plans_apart() -> None:
    specs = [_spec("a", 10, (5, 5)), _spec("b", 20, (10, 10))]
    plan = plan_step(specs, num_ranks=2, itemsize=2, chunk_bytes=100)
    assert plan.fingerprint() == plan_step(specs, num_ranks=2, itemsize=2, chunk_bytes=100).fingerprint()
    assert plan.fingerprint() != replace(plan, owners=plan.owners[::-1]).fingerprint()
