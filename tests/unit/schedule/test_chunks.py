"""Which matrices travel together."""

from __future__ import annotations

from lightning_muon.schedule.chunks import chunk
from lightning_muon.schedule.program import UNASSIGNED, Op, Program


def _ops(count: int) -> Program:
    return {
        UNASSIGNED: [
            Op(kind="newton_schulz", key=str(i), rank=UNASSIGNED, cost=10**i, items=(i,))
            for i in reversed(range(count))
        ]
    }


def _items(program: Program) -> list[tuple[int, ...]]:
    return [op.items for op in program[UNASSIGNED]]


def test_a_chunk_is_closed_when_every_owner_has_a_matrix_and_its_bytes_are_reached() -> None:
    program = chunk(_ops(7), sizes=[10] * 7, sole_holders=[None] * 7, num_owners=2, chunk_bytes=15)
    assert _items(program) == [(6, 5, 4), (3, 2, 1), (0,)]
    program = chunk(_ops(7), sizes=[10] * 7, sole_holders=[None] * 7, num_owners=3, chunk_bytes=1)
    assert _items(program) == [(6, 5, 4), (3, 2, 1), (0,)]


def test_where_every_rank_owns_all_a_chunk_has_at_most_its_bytes_or_one_matrix() -> None:
    program = chunk(_ops(4), sizes=[10, 10, 99, 10], sole_holders=[None] * 4, num_owners=1, chunk_bytes=20)
    assert _items(program) == [(3,), (2,), (1, 0)]


def test_an_op_has_the_cost_and_the_number_of_its_chunk() -> None:
    program = chunk(_ops(3), sizes=[1] * 3, sole_holders=[None] * 3, num_owners=2, chunk_bytes=1, key_prefix="mesh-")
    assert [(op.key, op.cost) for op in program[UNASSIGNED]] == [("mesh-0", 110), ("mesh-1", 1)]


def test_matrices_on_one_rank_come_first_with_a_bound_for_each_rank() -> None:
    holders = [None, 0, 1, 0, 1, None]
    program = chunk(_ops(6), sizes=[10] * 6, sole_holders=holders, num_owners=2, chunk_bytes=20)
    assert _items(program) == [(4, 3, 2, 1), (5, 0)]
    program = chunk(_ops(6), sizes=[10] * 6, sole_holders=holders, num_owners=2, chunk_bytes=5)
    assert _items(program) == [(4, 3), (2, 1), (5, 0)]


def test_ranks_fill_their_chunks_side_by_side_whatever_the_order_of_their_matrices() -> None:
    program = chunk(_ops(6), sizes=[10] * 6, sole_holders=[0, 0, 0, 1, 1, 1], num_owners=2, chunk_bytes=10)
    assert _items(program) == [(5, 2), (4, 1), (3, 0)]


def test_no_matrices_make_no_chunks() -> None:
    assert chunk({UNASSIGNED: []}, sizes=[], sole_holders=[], num_owners=2, chunk_bytes=1) == {UNASSIGNED: []}
