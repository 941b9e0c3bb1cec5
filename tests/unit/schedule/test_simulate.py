"""Timelines, against closed forms and lower bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from lightning_muon.schedule.cost import PRESETS, CostModel
from lightning_muon.schedule.program import COMPUTE, TRANSFER, Program
from lightning_muon.schedule.simulate import merge_equal_ranks, simulate
from lightning_muon.schedule.step import prefetch
from tests.unit.schedule.specs import UNIT, collective, compute, plan_of, programs, sharded


def test_a_serial_rank_takes_the_sum() -> None:
    timeline = simulate({0: [compute("a", 2), collective("b", 3, "a[0]"), compute("c", 5, "b[0]")]}, UNIT)
    assert [(span.start, span.end) for span in timeline.spans[0]] == [(0, 2), (2, 5), (5, 10)]
    assert timeline.makespan == 10
    (summary,) = timeline.ranks.values()
    assert (summary.compute_seconds, summary.transfer_seconds, summary.exposed_seconds) == (7, 3, 3)
    assert (timeline.idle, timeline.hidden) == (pytest.approx(0.3), 0)


def test_a_transfer_that_nothing_waits_for_is_hidden() -> None:
    timeline = simulate({0: [collective("b", 3), compute("a", 4)]}, UNIT)
    assert (timeline.makespan, timeline.idle, timeline.hidden) == (4, 0, 1)
    empty = simulate({}, UNIT)
    assert (empty.makespan, empty.idle, empty.hidden, empty.peak_bytes) == (0, 0, 1, 0)
    half = simulate({0: [collective("b", 8), compute("a", 4)]}, UNIT)
    assert (half.idle, half.hidden) == (0.5, 0.5)


def test_a_collective_waits_for_the_last_and_slowest_rank() -> None:
    program = {
        0: [compute("a", 1), collective("all", 2, "a[0]", group=(0, 1)), compute("b", 1, "all[0]")],
        1: [compute("a", 5, rank=1), collective("all", 7, "a[0]", rank=1, group=(0, 1))],
    }
    timeline = simulate(program, UNIT)
    assert [timeline.spans[rank][1][1:] for rank in (0, 1)] == [(5, 12), (5, 12)]
    assert timeline.makespan == 13
    # Waiting for rank 1 is idle time, but no transfer.
    assert timeline.ranks[0].transfer_seconds == 7
    assert timeline.ranks[0].compute_seconds == 2


def test_peak_bytes_count_results_until_their_last_use() -> None:
    ops = [
        compute("a", 2, memory=5),
        collective("b", 3, memory=7),
        compute("c", 2, "a[0]", memory=11),
        compute("d", 2, "b[0]", "c[0]"),
    ]
    # a 0-4, b 0-6, c 2-6.
    timeline = simulate({0: ops}, UNIT)
    assert timeline.ranks[0].peak_bytes == timeline.peak_bytes == 23
    # What a frees at 4 is there for what begins at 4.
    ops[2:] = [compute("c", 2, "a[0]"), compute("d", 2, "b[0]", memory=11), compute("e", 1, "d[0]")]
    assert simulate({0: ops}, UNIT).peak_bytes == 18


@settings(deadline=None)
@given(programs())
def test_the_makespan_is_bounded_by_lanes_and_chains(program: Program) -> None:
    makespan = simulate(program, UNIT).makespan
    for ops in program.values():
        for lane in (COMPUTE, TRANSFER):
            assert makespan >= sum(UNIT.seconds(op) for op in ops if op.lane == lane)
        longest: dict[str, float] = {}
        for op in ops:
            longest[op.name] = UNIT.seconds(op) + max((longest[name] for name in op.deps), default=0)
        assert makespan >= max(longest.values(), default=0)
    assert makespan <= sum(UNIT.seconds(op) for ops in program.values() for op in ops)
    backwards = simulate({rank: program[rank] for rank in reversed(program)}, UNIT)
    assert backwards.makespan == makespan, "the order in which ranks are listed means nothing"


def _muon(num_buckets: int, seconds: float, num_ranks: int = 4) -> Program:
    """Buckets with one second of Newton-Schulz on each rank and a gather and a scatter of ``seconds`` each."""
    numel = 1000 * num_ranks
    specs = sharded([numel] * num_buckets * num_ranks, num_ranks, flops=[1000] * num_buckets * num_ranks)
    program = plan_of(specs, itemsize=1).program
    size = int(1000 * seconds)
    return {
        rank: [replace(op, bytes=size if op.lane == TRANSFER else 0) for op in ops] for rank, ops in program.items()
    }


MILLI = CostModel(flops_per_second=1000.0, memory_bytes_per_second=1e30, bandwidth=(1000.0,))


def test_with_look_ahead_only_first_gather_and_last_scatter_show() -> None:
    serial = simulate(_muon(10, 0.25), MILLI)
    assert serial.makespan == pytest.approx(10 * (1 + 0.5))
    assert serial.hidden == pytest.approx(0)
    timeline = simulate(prefetch(_muon(10, 0.25), 2), MILLI)
    assert timeline.makespan == pytest.approx(10 * 1 + 0.25 + 0.25)
    assert timeline.hidden == pytest.approx(1 - 0.5 / 5)


def test_more_scatter_buffers_hide_the_slowest_owner() -> None:
    # In every bucket another rank has a matrix that takes twice as long: together all have the same to do.
    program = {
        rank: [
            replace(op, cost=2000 if int(op.key) % 4 == rank else 1000) if op.kind == "newton_schulz" else op
            for op in ops
        ]
        for rank, ops in _muon(12, 0.25).items()
    }
    tight, loose = (simulate(prefetch(program, look_ahead), MILLI).makespan for look_ahead in (2, 4))
    # Only the first gather and the last scatter are left beside the equal loads.
    assert loose == pytest.approx(12 * 1.25 + 0.5)
    assert tight == pytest.approx(loose + 0.5)


@pytest.mark.parametrize("num_matrices", [20, 8])
def test_equal_ranks_are_simulated_once(num_matrices: int) -> None:
    # 20 matrices on 8 ranks: four ranks own three, the others two.
    specs = sharded([8 * 2**18] * num_matrices, 8, flops=[10**12] * num_matrices)
    program = prefetch(plan_of(specs).program, 2)
    merged, like = merge_equal_ranks(program)
    assert len(merged) == (2 if num_matrices == 20 else 1)
    assert all(set(op.group) <= set(merged) for ops in merged.values() for op in ops)
    full, small = simulate(program, PRESETS["reference"]), simulate(merged, PRESETS["reference"])
    assert {rank: small.ranks[first] for rank, first in like.items()} == full.ranks
