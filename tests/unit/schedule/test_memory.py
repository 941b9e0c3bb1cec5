"""The bound of live results."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from lightning_muon.schedule.passes import Peak, peak_memory, prefetch
from lightning_muon.schedule.program import Op, Program
from lightning_muon.schedule.simulate import simulate
from tests.unit.schedule.programs import UNIT, collective, compute, programs
from tests.unit.schedule.specs import plan_of, sharded


@settings(deadline=None)
@given(programs())
def test_no_simulation_shows_more_than_the_bound(program: Program) -> None:
    for rank, summary in simulate(program, UNIT).ranks.items():
        assert summary.peak_bytes <= peak_memory({rank: program[rank]}).bytes


_A, _USE_A, _USE_B = compute("a", 1, memory=1), compute("use_a", 1, "a[0]"), compute("use_b", 1, "b[0]")


@pytest.mark.parametrize(
    ("ops", "num_bytes"),
    [
        # Lanes run side by side, so both results count, unless one op waits for the user of the other.
        ([_A, collective("b", 1, memory=10), _USE_A, _USE_B], 11),
        ([_A, _USE_A, collective("b", 1, "use_a[0]", memory=10), _USE_B], 10),
        # A user that is listed later keeps a result alive.
        ([_A, collective("late", 1, "a[0]"), compute("b", 1, "a[0]"), compute("c", 1, memory=2)], 3),
    ],
)
def test_results_that_may_be_alive_together_count(ops: list[Op], num_bytes: int) -> None:
    assert peak_memory({0: ops}).bytes == num_bytes


def test_a_chain_holds_two_neighbours_and_names_the_op() -> None:
    program = {
        rank: [
            compute("a", 1, memory=5, rank=rank),
            collective("b", 1, "a[0]", memory=7 + rank, rank=rank),
            compute("c", 1, "b[0]", memory=3, rank=rank),
            compute("d", 1, "c[0]", rank=rank),
        ]
        for rank in (0, 1)
    }
    assert peak_memory(program) == Peak(13, 1, "b[0]")
    assert peak_memory({}) == Peak(0, 0, "")


@pytest.mark.parametrize("look_ahead", [1, 2, 3])
def test_a_longer_step_needs_no_more_buffers(look_ahead: int) -> None:
    peaks = [
        peak_memory(prefetch(plan_of(sharded([12] * 3 * num_buckets, 3)).program, look_ahead)).bytes
        for num_buckets in (8, 40)
    ]
    assert peaks[0] == peaks[1]
    # Per bucket 16 bytes are received by the owner; up to look_ahead gathers and scatters (at least two) are on their
    # way, each with what is packed for it.
    assert peaks[0] <= 16 * (2 * look_ahead + 2 * max(2, look_ahead))
