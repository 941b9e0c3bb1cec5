"""Layouts: who holds what, in which replica, and who holds all."""

from __future__ import annotations

import pytest

from lightning_muon.schedule.holdings import MatrixSpec, holdings


def _spec(name: str, numel: int, *held: int) -> MatrixSpec:
    return MatrixSpec(name=name, numel=numel, flops=1, held=held)


def test_matrices_that_lie_alike_share_a_layout() -> None:
    where = holdings([_spec("a", 4, 2, 2), _spec("b", 5, 3, 2), _spec("c", 4, 2, 2)], [0, 0])
    assert where.layout_of == (0, 1, 0)
    assert where.layout(1).by_replica == {0: [(0, 3), (1, 2)]}
    assert where.num_ranks == 2


def test_the_elements_of_each_replica_are_added_up() -> None:
    (layout,) = holdings([_spec("a", 5, 5, 0, 2, 3)], [0, 0, 1, 1]).layouts
    assert layout.by_replica == {0: [(0, 5)], 1: [(2, 2), (3, 3)]}
    assert layout.replica_numel == {0: 5, 1: 5}
    assert layout.total == 10


def test_a_rank_that_has_all_while_no_other_has_any_is_the_sole_holder() -> None:
    specs = [_spec("split", 4, 2, 2), _spec("alone", 4, 0, 4), _spec("empty", 0, 0, 0)]
    assert holdings(specs, [0, 0]).sole_holders() == [None, 1, 0]
    # The first rank of each replica has all of it, so two ranks do; an expert may be in one replica only.
    assert holdings([_spec("twice", 9, 9, 9), _spec("expert", 9, 0, 9)], [0, 1]).sole_holders() == [None, 1]


@pytest.mark.parametrize("held", [(2, 3), (4, 4), (2, 0)])
def test_ranks_that_do_not_hold_all_of_a_matrix_are_an_error(held: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"must hold all 4 elements of w together, but they hold \{0: \d\}"):
        holdings([_spec("w", 4, *held)], [0, 0])


def test_a_replica_without_its_part_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"must hold all 4 elements of w together"):
        holdings([_spec("w", 4, 2, 2, 0, 0)], [0, 0, 1, 1])
