"""The plan of a step: each matrix arrives, loads are within a bound, a rank has its part of the whole plan."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_muon.schedule.assign import (
    longest_first,
)
from lightning_muon.schedule.muon import plan_step
from lightning_muon.schedule.validate import check_step
from tests.unit.schedule.specs import plan_of, sharded


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=30),
    st.sampled_from([(1, 2), (1, 5), (2, 1), (2, 3), (3, 2)]),
    st.integers(1, 2000),
    st.sampled_from(["lpt", "round_robin"]),
)
def test_each_matrix_has_one_owner_and_bucket_and_arrives(
    numels: list[int], mesh: tuple[int, int], chunk_bytes: int, strategy: str
) -> None:
    specs = sharded(numels, mesh[0] * mesh[1], mesh[0])
    plan = plan_of(specs, itemsize=1, chunk_bytes=chunk_bytes, strategy=strategy)
    assert sorted(job for bucket in plan.buckets for job in bucket) == list(range(len(numels)))
    assert all(len(owners) == 1 for owners in plan.owners)
    assert sum(plan.flops) == sum(numels)
    memory = dict.fromkeys(("momentum", "gather", "newton_schulz", "scatter", "update"), 0)
    for rank, ops in plan.program.items():
        owned = [item for op in ops if op.kind == "newton_schulz" for item in op.items]
        assert sorted(owned) == [item for item, owners in enumerate(plan.owners) if owners == (rank,)]
        assert sum(op.cost for op in ops) == plan.flops[rank]
        for op in ops:
            memory[op.kind] += op.memory
    # What all ranks receive is what has to arrive; matrices that lie on one rank do not travel.
    own = sum(spec.shards.held[owners[0]] for spec, owners in zip(specs, plan.owners, strict=True))
    assert memory["momentum"] == memory["gather"] == sum(numels) - own
    assert memory["newton_schulz"] == memory["scatter"] == mesh[0] * sum(numels) - own


@pytest.mark.parametrize("strategy", ["lpt", "round_robin", "redundant"])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_rank_gets_its_own_ops_of_the_whole_plan(strategy: str, num_replicas: int) -> None:
    matrices = sharded([40, 12, 9, 31, 8, 8], 4, num_replicas)
    options: dict[str, Any] = {"itemsize": 2, "chunk_bytes": 40, "strategy": strategy}
    everything = plan_step(matrices, **options)
    for rank in range(4):
        own = plan_step(matrices, **options, ranks=(rank,))
        assert own.program == {rank: everything.program[rank]}
        assert replace(own, program=everything.program) == everything
        check_step(own.program, [own], is_whole=False)


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
