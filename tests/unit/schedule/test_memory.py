"""The bound of live results."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from lightning_muon.schedule.memory import Peak, peak_memory, rank_peaks
from lightning_muon.schedule.muon import plan_step
from lightning_muon.schedule.passes import prefetch
from lightning_muon.schedule.program import Program
from lightning_muon.schedule.simulate import simulate
from tests.unit.schedule.programs import UNIT, collective, compute, programs
from tests.unit.schedule.specs import sharded


@settings(deadline=None)
@given(programs())
def test_no_simulation_shows_more_than_the_bound(program: Program) -> None:
    bounds = rank_peaks(program)
    for rank, summary in simulate(program, UNIT).ranks.items():
        assert summary.peak_bytes <= bounds[rank].bytes


def test_a_chain_holds_two_neighbours_at_a_time() -> None:
    chain = [
        compute("a", 1, memory=5),
        collective("b", 1, "a[0]", memory=7),
        compute("c", 1, "b[0]", memory=3),
        compute("d", 1, "c[0]"),
    ]
    assert rank_peaks({0: chain}) == {0: Peak(12, 0, "b[0]")}


def test_lanes_that_run_side_by_side_are_counted_together() -> None:
    ops = [
        compute("a", 1, memory=1),
        collective("b", 1, memory=10),
        compute("use_a", 1, "a[0]"),
        compute("use_b", 1, "b[0]"),
    ]
    assert rank_peaks({0: ops})[0].bytes == 11
    behind = [ops[0], ops[2], collective("b", 1, "use_a[0]", memory=10), ops[3]]
    assert rank_peaks({0: behind})[0].bytes == 10


def test_the_rank_that_needs_most_is_named() -> None:
    program = {
        rank: [compute("a", 1, rank=rank, memory=rank), compute("b", 1, "a[0]", rank=rank)] for rank in (0, 1, 2)
    }
    assert peak_memory(program) == Peak(2, 2, "a[0]")
    assert peak_memory({}) == Peak(0, 0, "")


def test_a_dependency_on_a_later_op_keeps_a_result_alive() -> None:
    ops = [compute("a", 1, memory=4), collective("late", 1, "a[0]"), compute("b", 1, "a[0]"), compute("c", 1, memory=2)]
    assert rank_peaks({0: ops})[0].bytes == 6


@pytest.mark.parametrize("look_ahead", [1, 2, 3])
def test_a_longer_step_needs_no_more_buffers(look_ahead: int) -> None:
    peaks: list[int] = []
    for num_buckets in (8, 40):
        plan = plan_step(sharded([12] * 3 * num_buckets, 3), num_ranks=3, itemsize=2, chunk_bytes=1)
        assert len(plan.buckets) == num_buckets
        peaks.append(peak_memory(prefetch(plan.program, look_ahead)).bytes)
    assert peaks[0] == peaks[1]
    # Per bucket 16 bytes are received by the owner; up to look_ahead gathers and a pair of scatters are on their way,
    # each with what is packed for it.
    assert peaks[0] <= 16 * (2 * look_ahead + 4)
