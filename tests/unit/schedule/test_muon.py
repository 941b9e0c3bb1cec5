"""The plan of a step: buckets, owners, ops, and what travels, against a count of every piece."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_muon.schedule import assign as assign_module
from lightning_muon.schedule.assign import (
    MatrixShards,
    MatrixSpec,
    Traffic,
    assign_owners,
    count_elements,
    even_out,
    longest_first,
)
from lightning_muon.schedule.muon import fill_buckets, plan_step
from lightning_muon.schedule.program import COMPUTE, TRANSFER
from lightning_muon.schedule.validate import check_step
from tests.unit.schedule.specs import grid, plan_of, replicated, sharded, spec


@pytest.mark.parametrize(
    ("sizes", "holders", "num_owners", "chunk_bytes", "expected"),
    [
        # A bucket is closed when every owner has a matrix and its bytes are reached.
        ([10] * 7, [None] * 7, 2, 15, [(6, 5, 4), (3, 2, 1), (0,)]),
        ([10] * 7, [None] * 7, 3, 1, [(6, 5, 4), (3, 2, 1), (0,)]),
        # Where every rank owns all, a bucket has at most its bytes or one matrix.
        ([10, 10, 99, 10], [None] * 4, 1, 20, [(3,), (2,), (1, 0)]),
        # Matrices on one rank come first, in buckets of their own.
        ([10] * 6, [None, 0, 1, 0, 1, None], 2, 20, [(4, 3, 2, 1), (5, 0)]),
        ([10] * 6, [None, 0, 1, 0, 1, None], 2, 5, [(4, 3), (2, 1), (5, 0)]),
        # Ranks fill their buckets side by side, whatever the order of their matrices.
        ([10] * 6, [0, 0, 0, 1, 1, 1], 2, 10, [(5, 2), (4, 1), (3, 0)]),
        ([], [], 2, 1, []),
    ],
)
def test_buckets_are_filled_from_the_last_matrix(
    sizes: list[int], holders: list[int | None], num_owners: int, chunk_bytes: int, expected: list[tuple[int, ...]]
) -> None:
    assert fill_buckets(sizes, holders, num_owners=num_owners, chunk_bytes=chunk_bytes) == expected


def test_every_rank_has_the_ops_of_every_bucket_in_order() -> None:
    plan = plan_of(sharded([10, 10, 10], 2), chunk_bytes=20, key_prefix="a")
    assert plan.buckets == ((2, 1), (0,))
    kinds = ("momentum", "gather", "newton_schulz", "scatter", "update")
    for rank in (0, 1):
        assert [op.name for op in plan.program[rank]] == [f"{kind}[a{key}]" for key in (0, 1) for kind in kinds]
        assert [op.lane for op in plan.program[rank][:5]] == [COMPUTE, TRANSFER, COMPUTE, TRANSFER, COMPUTE]
        for number in (0, 1):
            deps = [op.deps for op in plan.program[rank][5 * number : 5 * number + 5]]
            assert deps == [(), *((f"{kind}[a{number}]",) for kind in kinds[:4])]


def test_bytes_are_those_of_packing_sending_and_reading() -> None:
    # Rank 0 owns 12 elements and holds 6 + 4; rank 1 owns 8 and holds as much.
    plan = plan_of(sharded([12, 8], 2), chunk_bytes=100)
    assert plan.owners == ((0,), (1,))
    momentum, gather, newton_schulz, scatter, update = plan.program[0]
    assert (momentum.memory, momentum.bytes) == (4 * 2, 10 * 12 + 4 * 2)
    # Rank 0 sends its 4 elements of matrix 1 and gets the 6 of matrix 0.
    assert (gather.bytes, gather.memory, gather.axis_bytes) == (6 * 2, 6 * 2, (6 * 2, 0))
    assert (newton_schulz.memory, newton_schulz.bytes) == (6 * 2, 2 * 12 * 2 + 2 * 6 * 2)
    assert (scatter.bytes, scatter.memory) == (6 * 2, 4 * 2)
    assert (update.memory, update.bytes) == (0, 10 * (2 + 8))
    assert [op.items for op in plan.program[0]] == [(1, 0), (1, 0), (0,), (1, 0), (1, 0)]
    assert [op.cost for op in plan.program[0]] == [0, 0, 12, 0, 0]
    assert [op.group for op in plan.program[0]] == [(), (0, 1), (), (0, 1), ()]


def test_on_a_grid_only_updates_travel_between_replicas() -> None:
    program = plan_of(sharded([12], 4, 2), itemsize=1).program
    gathers, scatters = ([ops[index] for ops in program.values()] for index in (1, 3))
    assert [op.axis_bytes for op in gathers] == [(6, 0), (6, 0), (0, 0), (0, 0)]
    assert [op.axis_bytes for op in scatters] == [(6, 12), (6, 0), (0, 6), (0, 6)]
    assert [op.bytes for op in scatters] == [18, 6, 6, 6]
    assert [op.memory for op in scatters] == [0, 6, 6, 6]


def test_ops_that_move_nothing_on_any_rank_are_left_out() -> None:
    whole = replicated([6, 6], 2)
    plan = plan_of(whole, itemsize=4, chunk_bytes=100)
    assert [op.kind for op in plan.program[0]] == ["momentum", "newton_schulz", "scatter", "update"]
    scatter = plan.program[0][2]
    assert (scatter.bytes, scatter.axis_bytes, scatter.memory) == (24, (0, 24), 24)
    for plan in (plan_of(whole, strategy="redundant", chunk_bytes=100), plan_of(sharded([6, 0], 1))):
        assert [op.kind for op in plan.program[0]][:3] == ["momentum", "newton_schulz", "update"]


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


def test_a_matrix_on_one_rank_stays_there() -> None:
    local = spec("local", 100, (0, 100), (0, 0), flops=100)
    plan = plan_of([local, *sharded([60, 40], 2)], itemsize=4, chunk_bytes=10**6)
    assert (plan.owners, plan.flops, plan.buckets) == (((1,), (0,), (0,)), (100, 100), ((0,), (2, 1)))
    for rank, (cost, held, items) in enumerate([(0, 0, ()), (100, 100, (0,))]):
        assert [(op.name, op.cost, op.bytes, op.items) for op in plan.program[rank][:3]] == [
            ("momentum[0]", 0, held * 12, (0,)),
            ("newton_schulz[0]", cost, 2 * held * 4, items),
            ("update[0]", 0, held * 12, (0,)),
        ]


def test_every_rank_owns_everything_in_the_redundant_baseline() -> None:
    plan = plan_of(sharded([12, 8], 4), chunk_bytes=1000, strategy="redundant")
    assert plan.owners == ((0, 1, 2, 3),) * 2
    assert plan.flops == (20,) * 4
    assert [op.kind for op in plan.program[3]] == ["momentum", "gather", "newton_schulz", "update"]
    # Three peers get (and send) 3 + 2 elements each.
    assert plan.program[3][1].bytes == 3 * 5 * 2
    # A bucket is bounded in whole bytes.
    assert plan_of(sharded([10] * 3, 2), chunk_bytes=20, strategy="redundant").buckets == ((2,), (1,), (0,))


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


def test_bytes_break_ties_and_loads_are_remembered() -> None:
    loads = [(5, 100), (5, 10), (6, 0)]
    assert longest_first([3], [7], loads, taken=[0]) == {0: 1}
    assert loads == [(5, 100), (8, 17), (6, 0)]
    assert longest_first([1, 2], [1, 1], loads, taken=[1, 0]) == {1: 0, 0: 2}


def _assign(buckets: list[tuple[int, ...]], costs: list[int], **options: Any) -> list[tuple[int, ...]]:
    options = {"strategy": "lpt", "sole_holders": [None] * len(costs), "loads": [(0, 0), (0, 0)]} | options
    return assign_owners(buckets, costs=costs, sizes=[1] * len(costs), **options)


def test_later_buckets_even_out_earlier_ones() -> None:
    # 5 | 4 + 2, then 10 to the lighter rank 0 and 1 to rank 1: 15 | 7. To even out, 5 goes to rank 1 and 1 to rank 0.
    assert _assign([(4, 3, 2), (1, 0)], [1, 10, 4, 5, 2]) == [(0,), (0,), (1,), (1,), (1,)]


def test_only_the_last_buckets_of_longest_first_are_evened_out() -> None:
    buckets = [(2 * number + 1, 2 * number) for number in range(6)]
    costs, loads = [4, 3] * 6, [(0, 0), (30, 0)]
    owners = _assign(buckets, costs, loads=loads)
    # All goes to rank 0 until it has as much as rank 1; round robin takes turns whatever the load.
    assert owners[:4] == [(0,)] * 4
    zero, one = _loads(costs, [owner for (owner,) in owners], 2)
    assert abs(zero - one - 30) <= 1
    assert _assign(buckets, costs, loads=loads, strategy="round_robin") == [(1,), (0,)] * 6


@pytest.mark.parametrize(("strategy", "shared"), [("lpt", (0,)), ("round_robin", None), ("redundant", (0, 1))])
def test_what_lies_on_one_rank_stays_and_counts_first(strategy: str, shared: tuple[int, ...] | None) -> None:
    owners = _assign([(0,), (2, 1)], [6, 5, 5], sole_holders=[1, None, None], strategy=strategy)
    # With lpt, rank 1 starts with 6, so that rank 0 is the lighter one even with 5.
    assert owners == [(1,), *([(1,), (0,)] if shared is None else [shared, shared])]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=8), min_size=1, max_size=4), st.integers(1, 4), st.data()
)
def test_the_busiest_gets_less_until_no_exchange_is_left(
    bucket_costs: list[list[int]], num_ranks: int, data: st.DataObject
) -> None:
    costs = [cost for bucket in bucket_costs for cost in bucket]
    matrices = iter(range(len(costs)))
    buckets = [{next(matrices): data.draw(st.integers(0, num_ranks - 1)) for _ in bucket} for bucket in bucket_costs]
    members = [set(bucket) for bucket in buckets]

    def loads_now() -> list[tuple[int, int]]:
        owner_of = {matrix: owner for bucket in buckets for matrix, owner in bucket.items()}
        return [(load, 2 * load) for load in _loads(costs, [owner_of[i] for i in range(len(costs))], num_ranks)]

    loads = loads_now()
    most = max(loads)
    even_out(buckets, costs, [2 * cost for cost in costs], loads)
    assert [set(bucket) for bucket in buckets] == members
    assert loads == loads_now()
    assert max(loads) <= most
    busiest = max(range(num_ranks), key=lambda rank: loads[rank][0])
    for bucket in buckets:
        for matrix in (matrix for matrix, owner in bucket.items() if owner == busiest):
            assert all(costs[matrix] >= loads[busiest][0] - load for load, _ in loads)
            for other, owner in bucket.items():
                relief = costs[matrix] - costs[other]
                assert relief <= 0 or relief >= loads[busiest][0] - loads[owner][0]


def test_so_many_comparisons_are_made_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assign_module, "MOST_COMPARISONS", 1)
    buckets = [dict.fromkeys(range(8), 0)]
    even_out(buckets, [1] * 8, [1] * 8, [(8, 8), (0, 0)])
    assert list(buckets[0].values()).count(1) == 1
