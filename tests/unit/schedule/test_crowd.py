"""One rank of each kind gives the timeline of all."""

from __future__ import annotations

import pytest

from lightning_muon.schedule.cost import PRESETS
from lightning_muon.schedule.crowd import Crowd, merge_equal_ranks
from lightning_muon.schedule.muon import MatrixSpec, plan_step
from lightning_muon.schedule.passes import prefetch
from lightning_muon.schedule.program import Program
from lightning_muon.schedule.simulate import simulate


def _program(num_ranks: int, num_matrices: int) -> Program:
    held = (2**18,) * num_ranks
    numel = sum(held)
    specs = [MatrixSpec(name=str(i), numel=numel, flops=10**12, held=held) for i in range(num_matrices)]
    return plan_step(specs, num_ranks=num_ranks, itemsize=2, chunk_bytes=1).program


def test_equal_ranks_become_one_and_the_timeline_stays() -> None:
    # 20 matrices on 8 ranks: four ranks own three, the others two.
    program = prefetch(_program(8, 20), 2)
    merged, sizes = merge_equal_ranks(program)
    assert sorted(sizes.values()) == [4, 4]
    assert all(set(op.group) <= set(sizes) for ops in merged.values() for op in ops)
    full, small = simulate(program, PRESETS["reference"]), simulate(merged, PRESETS["reference"])
    assert small.makespan == full.makespan
    crowd = Crowd(sizes=sizes, loads=[1.0] * 8)
    assert crowd.idle(small) == pytest.approx(full.idle, abs=1e-12)
    assert crowd.hidden(small) == pytest.approx(full.hidden, abs=1e-12)


def test_ranks_that_differ_are_all_kept() -> None:
    program = _program(3, 2)
    ops = {rank: [op for op in program[rank] if not op.group] for rank in program}
    different = {rank: ops[rank][rank:] for rank in ops}
    merged, sizes = merge_equal_ranks(different)
    assert merged == different
    assert sizes == {0: 1, 1: 1, 2: 1}


def test_a_crowd_without_ranks_or_transfers_is_neither_idle_nor_exposed() -> None:
    timeline = simulate({}, PRESETS["reference"])
    crowd = Crowd(sizes={}, loads=())
    assert crowd.idle(timeline) == 0.0
    assert crowd.hidden(timeline) == 1.0
