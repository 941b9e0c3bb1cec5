"""The plan of a step: who owns what, what travels, and in which buckets."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_muon.schedule.muon import MatrixSpec, plan_step
from lightning_muon.schedule.program import COMPUTE, TRANSFER
from lightning_muon.schedule.validate import check_step
from tests.unit.schedule.specs import grid, replicated, sharded


def test_every_rank_has_the_five_ops_of_every_bucket_in_their_order() -> None:
    plan = plan_step(sharded([10, 10, 10], 2), num_ranks=2, itemsize=2, chunk_bytes=20, key_prefix="a")
    assert plan.buckets == ((2, 1), (0,))
    for rank in (0, 1):
        assert [op.name for op in plan.program[rank]] == [
            *("momentum[a0]", "gather[a0]", "newton_schulz[a0]", "scatter[a0]", "update[a0]"),
            *("momentum[a1]", "gather[a1]", "newton_schulz[a1]", "scatter[a1]", "update[a1]"),
        ]
        assert [op.lane for op in plan.program[rank][:5]] == [COMPUTE, TRANSFER, COMPUTE, TRANSFER, COMPUTE]
        assert plan.program[rank][1].deps == ("momentum[a0]",)
        assert plan.program[rank][5].deps == ()
        assert plan.program[rank][1].group == (0, 1)


def test_a_matrix_on_one_rank_stays_there_and_counts_in_the_balance() -> None:
    local = MatrixSpec(name="local", numel=100, flops=100, held=(0, 100))
    plan = plan_step([local, *sharded([60, 40], 2)], num_ranks=2, itemsize=4, chunk_bytes=10**6)
    assert plan.owners == ((1,), (0,), (0,))
    assert plan.flops == (100, 100)
    assert plan.buckets == ((0,), (2, 1))
    assert [op.kind for op in plan.program[0] if op.key == "0"] == ["momentum", "newton_schulz", "update"]
    assert [op.items for op in plan.program[0] if op.kind == "newton_schulz"] == [(), (2, 1)]


def test_one_rank_alone_has_nothing_to_exchange() -> None:
    plan = plan_step(sharded([6, 0], 1), num_ranks=1, itemsize=4, chunk_bytes=100)
    assert plan.owners == ((0,), (0,))
    assert {op.kind for op in plan.program[0]} == {"momentum", "newton_schulz", "update"}


def test_replicated_matrices_are_only_scattered() -> None:
    plan = plan_step(replicated([6, 6], 2), num_ranks=2, itemsize=4, chunk_bytes=100, replica_of=[0, 1])
    assert [op.kind for op in plan.program[0]] == ["momentum", "newton_schulz", "scatter", "update"]
    scatter = plan.program[0][2]
    assert (scatter.bytes, scatter.axis_bytes, scatter.memory) == (24, (0, 24), 24)


def test_every_rank_owns_everything_in_the_redundant_baseline() -> None:
    plan = plan_step(sharded([12, 8], 4), num_ranks=4, itemsize=2, chunk_bytes=1000, strategy="redundant")
    assert plan.owners == ((0, 1, 2, 3),) * 2
    assert plan.flops == (20,) * 4
    assert [op.kind for op in plan.program[3]] == ["momentum", "gather", "newton_schulz", "update"]
    # Three peers get (and send) 3 + 2 elements each.
    assert plan.program[3][1].bytes == 3 * 5 * 2


def test_a_bucket_of_the_redundant_baseline_is_bounded_in_whole_bytes() -> None:
    specs = sharded([10] * 4, 2)
    assert plan_step(specs, num_ranks=2, itemsize=2, chunk_bytes=20, strategy="redundant").buckets == (
        *((3,), (2,), (1,), (0,)),
    )
    assert plan_step(specs, num_ranks=2, itemsize=2, chunk_bytes=20).buckets == ((3, 2), (1, 0))


def test_the_rounds_of_round_robin_go_on_from_bucket_to_bucket() -> None:
    plan = plan_step(sharded([8] * 7, 3), num_ranks=3, itemsize=1, chunk_bytes=1, strategy="round_robin")
    assert plan.buckets == ((6, 5, 4), (3, 2, 1), (0,))
    assert plan.owners == ((0,), (2,), (1,), (0,), (2,), (1,), (0,))
    assert plan_step(sharded([8] * 4, 3), num_ranks=3, itemsize=1, chunk_bytes=64, strategy="round_robin").owners == (
        *((0,), (2,), (1,), (0,)),
    )


def test_loads_of_before_are_evened_out() -> None:
    plan = plan_step(sharded([10, 10], 2), num_ranks=2, itemsize=2, chunk_bytes=100, loads=[(20, 0), (0, 0)])
    assert plan.owners == ((1,), (1,))
    assert plan.flops == (0, 20)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=30),
    st.sampled_from([(1, 2), (1, 5), (2, 1), (2, 3), (3, 2)]),
    st.integers(1, 2000),
    st.sampled_from(["lpt", "round_robin"]),
)
def test_every_matrix_is_owned_once_and_is_in_one_bucket(
    numels: list[int], mesh: tuple[int, int], chunk_bytes: int, strategy: str
) -> None:
    num_ranks = mesh[0] * mesh[1]
    specs = sharded(numels, num_ranks, mesh[0])
    plan = plan_step(
        specs,
        num_ranks=num_ranks,
        itemsize=2,
        chunk_bytes=chunk_bytes,
        strategy=strategy,  # type: ignore[arg-type]
        replica_of=grid(*mesh),
    )
    assert sorted(job for bucket in plan.buckets for job in bucket) == list(range(len(numels)))
    assert all(len(owners) == 1 and 0 <= owners[0] < num_ranks for owners in plan.owners)
    assert sum(plan.flops) == sum(spec.flops for spec in specs)
    for rank, ops in plan.program.items():
        owned = [item for op in ops if op.kind == "newton_schulz" for item in op.items]
        assert sorted(owned) == [item for item, owners in enumerate(plan.owners) if owners == (rank,)]
        assert sum(op.cost for op in ops) == plan.flops[rank]


def test_lpt_balances_160_matrices_on_8_ranks_within_two_percent() -> None:
    # 40 layers, each with an attention input and output, and an MLP of another width: about 10B parameters.
    numels = [size for _ in range(40) for size in (5120 * 15360, 5120 * 5120, 5120 * 13824, 13824 * 5120)]
    plan = plan_step(sharded(numels, 8), num_ranks=8, itemsize=2, chunk_bytes=2**27)
    assert max(plan.flops) * 8 <= 1.02 * sum(numels)


def test_planning_45000_matrices_on_4096_ranks_takes_seconds() -> None:
    generator = random.Random(0)
    held = [(size,) * 4096 for size in (512, 1792, 3584)]
    specs = [
        MatrixSpec(name=str(i), numel=held[i % 3][0] * 4096, flops=generator.randrange(10**9), held=held[i % 3])
        for i in range(45_000)
    ]
    start = time.process_time()
    plan = plan_step(specs, num_ranks=4096, itemsize=2, chunk_bytes=2**28)
    # A second of one core; a plan that looks at pairs of ranks takes minutes.
    assert time.process_time() - start < 10
    assert len(plan.program) == 4096


def test_the_fingerprint_tells_plans_apart() -> None:
    specs = sharded([10, 20], 2)
    plan = plan_step(specs, num_ranks=2, itemsize=2, chunk_bytes=100)
    assert plan.fingerprint() == plan_step(specs, num_ranks=2, itemsize=2, chunk_bytes=100).fingerprint()
    assert plan.fingerprint() != replace(plan, owners=plan.owners[::-1]).fingerprint()


def test_a_wrong_argument_is_named() -> None:
    specs = sharded([10], 2)
    with pytest.raises(ValueError, match=r"w0 says what 2 ranks hold, but the exchange group has 3 ranks"):
        plan_step(specs, num_ranks=3, itemsize=2, chunk_bytes=100)
    with pytest.raises(ValueError, match=r"replica_of has 2 entries for 3 ranks"):
        plan_step(specs, num_ranks=3, itemsize=2, chunk_bytes=100, replica_of=[0, 0])
    with pytest.raises(ValueError, match=r"loads has 1 entries for 2 ranks"):
        plan_step(specs, num_ranks=2, itemsize=2, chunk_bytes=100, loads=[(0, 0)])
    with pytest.raises(ValueError, match=r"chunk_bytes must be at least 1, got 0"):
        plan_step(specs, num_ranks=2, itemsize=2, chunk_bytes=0)
    with pytest.raises(ValueError, match=r"strategy must be one of .*, got 'best'"):
        plan_step(specs, num_ranks=2, itemsize=2, chunk_bytes=100, strategy="best")  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["lpt", "round_robin", "redundant"])
@pytest.mark.parametrize("replica_of", [[0] * 4, grid(2, 2)], ids=str)
def test_a_rank_that_asks_for_its_own_ops_gets_those_of_the_whole_plan(strategy: str, replica_of: list[int]) -> None:
    specs = sharded([40, 12, 9, 31, 8, 8], 4, len(set(replica_of)))
    options = {"num_ranks": 4, "itemsize": 2, "chunk_bytes": 40, "replica_of": replica_of, "strategy": strategy}
    everything = plan_step(specs, **options)  # type: ignore[arg-type]
    for rank in range(4):
        own = plan_step(specs, **options, ranks=(rank,))  # type: ignore[arg-type]
        assert own.program == {rank: everything.program[rank]}
        assert replace(own, program=everything.program) == everything
        assert own.fingerprint() == everything.fingerprint()
        check_step(own.program, [own], is_whole=False)


def test_the_fingerprint_tells_another_order_of_communications() -> None:
    plan = plan_step(sharded([10, 10, 10], 2), num_ranks=2, itemsize=2, chunk_bytes=20, ranks=(1,))
    reordered = replace(plan, program={1: [*plan.program[1][5:], *plan.program[1][:5]]})
    assert reordered.fingerprint() != plan.fingerprint()


def test_a_matrix_that_a_rank_owns_and_does_not_compute_is_noticed_on_that_rank() -> None:
    plan = plan_step(sharded([10, 10, 10], 2), num_ranks=2, itemsize=2, chunk_bytes=20, ranks=(0,))
    idle = [replace(op, items=()) if op.kind == "newton_schulz" else op for op in plan.program[0]]
    changed = replace(plan, program={0: idle})
    with pytest.raises(ValueError, match=r"of rank 0 has matrix \d 0 times"):
        check_step(changed.program, [changed], is_whole=False)
