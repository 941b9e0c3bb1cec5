"""The ops around Newton-Schulz, and their bytes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_muon.schedule.buckets import fill_buckets, insert_communication, owners_of
from lightning_muon.schedule.matrix_shards import MatrixSpec, sharded_matrices
from lightning_muon.schedule.muon import plan_step
from lightning_muon.schedule.program import UNASSIGNED, Op, Program
from tests.unit.schedule.specs import grid, replicated, sharded


def _assigned(*by_rank: tuple[int, ...]) -> Program:
    return {
        rank: [Op(kind="newton_schulz", key="0", rank=rank, cost=len(items), items=items)]
        for rank, items in enumerate(by_rank)
    }


def _bucket(*items: int) -> Op:
    return Op(kind="newton_schulz", key="0", rank=UNASSIGNED, items=items)


def test_owners_are_read_off_in_ascending_order() -> None:
    assert owners_of(_assigned((2, 0), (), (1, 2)), 4) == [(0,), (2,), (0, 2), ()]
    shared = (1, 0)
    owners = owners_of(_assigned(shared, shared, shared), 2)
    assert owners == [(0, 1, 2)] * 2
    assert owners[0] is owners[1]


def test_bytes_are_those_of_packing_sending_and_reading_weights() -> None:
    # Rank 0 owns 12 elements and holds 6 + 4; rank 1 owns 8 and holds as much.
    program = insert_communication(
        _assigned((0,), (1,)), sharded_matrices(sharded([12, 8], 2), [0, 0]), itemsize=2, buckets=[_bucket(1, 0)]
    )
    momentum, gather, newton_schulz, scatter, update = program[0]
    assert (momentum.memory, momentum.bytes) == (4 * 2, 10 * 12 + 4 * 2)
    # Rank 0 sends its 4 elements of matrix 1 and gets the 6 of matrix 0.
    assert (gather.bytes, gather.memory, gather.axis_bytes) == (6 * 2, 6 * 2, ())
    assert (newton_schulz.memory, newton_schulz.bytes) == (6 * 2, 2 * 12 * 2 + 2 * 6 * 2)
    assert (scatter.bytes, scatter.memory) == (6 * 2, 4 * 2)
    assert (update.memory, update.bytes) == (0, 10 * (2 + 8))
    assert [op.items for op in program[0]] == [(1, 0), (1, 0), (0,), (1, 0), (1, 0)]
    assert [op.cost for op in program[0]] == [0, 0, 1, 0, 0]
    assert [op.group for op in program[0]] == [(), (0, 1), (), (0, 1), ()]
    assert [op.deps for op in program[0]] == [
        *((), ("momentum[0]",), ("gather[0]",), ("newton_schulz[0]",), ("scatter[0]",))
    ]


def test_on_a_grid_only_updates_travel_between_replicas() -> None:
    where = sharded_matrices(sharded([12], 4, 2), grid(2, 2))
    program = insert_communication(_assigned((0,), (), (), ()), where, itemsize=1, buckets=[_bucket(0)])
    gathers, scatters = ([ops[index] for ops in program.values()] for index in (1, 3))
    assert [op.axis_bytes for op in gathers] == [(6, 0), (6, 0), (0, 0), (0, 0)]
    assert [op.axis_bytes for op in scatters] == [(6, 12), (6, 0), (0, 6), (0, 6)]
    assert [op.bytes for op in scatters] == [18, 6, 6, 6]
    assert [op.memory for op in scatters] == [0, 6, 6, 6]


def test_ops_that_move_nothing_on_any_rank_are_left_out() -> None:
    where = sharded_matrices(replicated([5, 6], 2), [0, 1])
    program = insert_communication(_assigned((0,), (1,)), where, itemsize=1, buckets=[_bucket(1, 0)])
    assert [op.kind for op in program[1]] == ["momentum", "newton_schulz", "scatter", "update"]
    assert program[1][1].deps == ("momentum[0]",)
    both = (1, 0)
    program = insert_communication(_assigned(both, both), where, itemsize=1, buckets=[_bucket(*both)])
    assert [op.kind for op in program[1]] == ["momentum", "newton_schulz", "update"]


@settings(deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=15), st.sampled_from([(1, 3), (2, 2), (3, 2)]))
def test_what_all_ranks_receive_is_what_has_to_arrive(numels: list[int], mesh: tuple[int, int]) -> None:
    num_ranks = mesh[0] * mesh[1]
    specs, replica_of = sharded(numels, num_ranks, mesh[0]), grid(*mesh)
    plan = plan_step(specs, num_ranks=num_ranks, itemsize=1, chunk_bytes=30, replica_of=replica_of)
    memory = dict.fromkeys(("momentum", "gather", "newton_schulz", "scatter", "update"), 0)
    for op in (op for ops in plan.program.values() for op in ops):
        memory[op.kind] += op.memory
    own = sum(spec.held[owners[0]] for spec, owners in zip(specs, plan.owners, strict=True))
    assert memory["momentum"] == memory["gather"] == sum(numels) - own
    assert memory["newton_schulz"] == memory["scatter"] == mesh[0] * sum(numels) - own


def test_idle_ranks_of_buckets_that_stay_can_be_left_out() -> None:
    specs = [MatrixSpec(name="expert", numel=8, flops=1, held=(0, 8, 0)), *sharded([6], 3)]
    full, short = (
        plan_step(specs, num_ranks=3, itemsize=2, chunk_bytes=100, keep_idle=keep_idle) for keep_idle in (True, False)
    )
    assert short.program[1] == full.program[1]
    assert short.program[0] == full.program[0][3:]
    assert [(op.name, op.cost, op.bytes, op.items) for op in full.program[0][:3]] == [
        ("momentum[0]", 0, 0, (0,)),
        ("newton_schulz[0]", 0, 0, ()),
        ("update[0]", 0, 0, (0,)),
    ]
    assert [(op.name, op.cost, op.bytes) for op in full.program[1][:3]] == [
        ("momentum[0]", 0, 8 * 12),
        ("newton_schulz[0]", 1, 2 * 8 * 2),
        ("update[0]", 0, 8 * 10),
    ]


def _ops(count: int) -> Program:
    return {
        UNASSIGNED: [
            Op(kind="newton_schulz", key=str(i), rank=UNASSIGNED, cost=10**i, items=(i,))
            for i in reversed(range(count))
        ]
    }


def _items(program: Program) -> list[tuple[int, ...]]:
    return [op.items for op in program[UNASSIGNED]]


def test_a_bucket_is_closed_when_every_owner_has_a_matrix_and_its_bytes_are_reached() -> None:
    program = fill_buckets(_ops(7), sizes=[10] * 7, sole_holders=[None] * 7, num_owners=2, chunk_bytes=15)
    assert _items(program) == [(6, 5, 4), (3, 2, 1), (0,)]
    program = fill_buckets(_ops(7), sizes=[10] * 7, sole_holders=[None] * 7, num_owners=3, chunk_bytes=1)
    assert _items(program) == [(6, 5, 4), (3, 2, 1), (0,)]


def test_where_every_rank_owns_all_a_bucket_has_at_most_its_bytes_or_one_matrix() -> None:
    program = fill_buckets(_ops(4), sizes=[10, 10, 99, 10], sole_holders=[None] * 4, num_owners=1, chunk_bytes=20)
    assert _items(program) == [(3,), (2,), (1, 0)]


def test_an_op_has_the_cost_and_the_number_of_its_bucket() -> None:
    program = fill_buckets(
        _ops(3), sizes=[1] * 3, sole_holders=[None] * 3, num_owners=2, chunk_bytes=1, key_prefix="mesh-"
    )
    assert [(op.key, op.cost) for op in program[UNASSIGNED]] == [("mesh-0", 110), ("mesh-1", 1)]


def test_matrices_on_one_rank_come_first_with_a_bound_for_each_rank() -> None:
    holders = [None, 0, 1, 0, 1, None]
    program = fill_buckets(_ops(6), sizes=[10] * 6, sole_holders=holders, num_owners=2, chunk_bytes=20)
    assert _items(program) == [(4, 3, 2, 1), (5, 0)]
    program = fill_buckets(_ops(6), sizes=[10] * 6, sole_holders=holders, num_owners=2, chunk_bytes=5)
    assert _items(program) == [(4, 3), (2, 1), (5, 0)]


def test_ranks_fill_their_buckets_side_by_side_whatever_the_order_of_their_matrices() -> None:
    program = fill_buckets(_ops(6), sizes=[10] * 6, sole_holders=[0, 0, 0, 1, 1, 1], num_owners=2, chunk_bytes=10)
    assert _items(program) == [(5, 2), (4, 1), (3, 0)]


def test_no_matrices_make_no_buckets() -> None:
    assert fill_buckets({UNASSIGNED: []}, sizes=[], sole_holders=[], num_owners=2, chunk_bytes=1) == {UNASSIGNED: []}
