"""Whether gathers that start during backward pay: beside the simulator, and on machines that plans are made for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_muon.math.newton_schulz import newton_schulz_flops
from lightning_muon.schedule.cost import PRESETS, CostModel
from lightning_muon.schedule.muon import MatrixSpec, MuonPlan, plan_step
from lightning_muon.schedule.overlap import EarlyEstimate, estimate_early, machine_of, rank_seconds
from lightning_muon.schedule.passes import prefetch
from lightning_muon.schedule.program import GATHER, MOMENTUM, Op, Program
from lightning_muon.schedule.simulate import simulate
from tests.unit.schedule.specs import replicated

_H100 = PRESETS["h100"]


def _plan(num_matrices: int, rows: int, cols: int, num_ranks: int) -> MuonPlan:
    held = (rows * cols // num_ranks,) * num_ranks
    flops = newton_schulz_flops(rows, cols, 5)
    specs = [MatrixSpec(name=f"w{i}", numel=rows * cols, flops=flops, held=held) for i in range(num_matrices)]
    return plan_step(specs, num_ranks=num_ranks, itemsize=2, chunk_bytes=4 * 2**20)


def _without_early(program: Program) -> Program:
    """The step after a backward pass in which everything was gathered but the last bucket, which goes first now."""
    last = [op.key for op in program[0] if op.kind == GATHER][-1]

    def left(op: Op) -> Op:
        op = replace(op, bytes=0) if op.kind == MOMENTUM else op
        return replace(op, bytes=0, group=()) if op.kind == GATHER and op.key != last else op

    issued = prefetch(program, 3, scatter_buffers=3)
    found: Program = {}
    for rank, ops in issued.items():
        is_first = [op.key == last and op.kind in (MOMENTUM, GATHER) for op in ops]
        first = [
            replace(op, deps=op.deps[:1] if op.kind == GATHER else ())
            for op, yes in zip(ops, is_first, strict=True)
            if yes
        ]
        found[rank] = first + [left(op) for op, yes in zip(ops, is_first, strict=True) if not yes]
    return found


def _estimate(program: Program, machine: CostModel) -> EarlyEstimate | None:
    return estimate_early([rank_seconds(ops, machine) for ops in program.values()])


@pytest.mark.parametrize("bandwidth", [360e9, 40e9, 5e9, 0.5e9])
@pytest.mark.parametrize(
    ("num_matrices", "rows", "cols", "num_ranks"),
    [(64, 4096, 4096, 8), (64, 1024, 4096, 8), (48, 512, 512, 4), (64, 8192, 8192, 16), (16, 2048, 2048, 16)],
)
def test_both_steps_take_as_long_as_in_the_simulator(
    num_matrices: int, rows: int, cols: int, num_ranks: int, bandwidth: float
) -> None:
    program = _plan(num_matrices, rows, cols, num_ranks).program
    machine = replace(_H100, bandwidth=(bandwidth,), latency_seconds=(20e-6,))
    found = _estimate(program, machine)
    assert found is not None
    in_step = simulate(prefetch(program, 3, scatter_buffers=3), machine).makespan
    in_backward = simulate(_without_early(program), machine).makespan + found.check_seconds
    # The estimate takes all buckets for equally large, and leaves out how many may be on their way.
    assert found.in_step_seconds == pytest.approx(in_step, rel=0.25)
    assert found.in_backward_seconds == pytest.approx(in_backward, rel=0.25)
    if max(in_step, in_backward) > 1.3 * min(in_step, in_backward):
        assert found.pays == (in_backward < in_step)


@pytest.mark.parametrize(
    ("bandwidth", "side", "pays"),
    [
        # Within a machine of NVLink the check takes longer than all gathers do.
        (360e9, 4096, False),
        (360e9, 1024, False),
        # 40 GB/s hide behind the arithmetic of large matrices, 2 GB/s do not.
        (40e9, 4096, False),
        (2e9, 4096, True),
    ],
)
def test_gathers_start_early_only_over_links_that_the_step_waits_for(bandwidth: float, side: int, pays: bool) -> None:
    machine = replace(_H100, bandwidth=(bandwidth,), latency_seconds=(20e-6,))
    found = _estimate(_plan(64, side, side, 8).program, machine)
    assert found is not None
    assert found.pays is pays


def test_one_bucket_has_no_head_start() -> None:
    # Its last gradient is there when backward ends.
    program = _plan(8, 1024, 1024, 8).program
    found = _estimate(program, replace(_H100, bandwidth=(1e6,)))
    assert found is not None
    assert not found.pays


def test_what_is_not_gathered_has_no_estimate() -> None:
    whole = plan_step(replicated([60, 60], 2), num_ranks=2, itemsize=2, chunk_bytes=1, replica_of=[0, 1])
    assert _estimate(whole.program, _H100) is None
    alone = plan_step([MatrixSpec(name="w", numel=9, flops=9, held=(9,))], num_ranks=1, itemsize=2, chunk_bytes=1)
    assert _estimate(alone.program, _H100) is None


@pytest.mark.parametrize("device_type", ["cuda", "cpu", "xpu"])
def test_links_between_machines_are_slower_than_those_inside(device_type: str) -> None:
    inside = machine_of(device_type, is_between_machines=(False, False))
    mixed = machine_of(device_type, is_between_machines=(False, True))
    between = machine_of(device_type, is_between_machines=(True, True))
    assert mixed.bandwidth == (inside.bandwidth[0], between.bandwidth[1])
    assert between.bandwidth[0] == between.bandwidth[1] < inside.bandwidth[0] == inside.bandwidth[1]
    assert len(between.latency_seconds) == 2
    if device_type != "cpu":
        assert (inside.bandwidth[0], between.bandwidth[1]) == _H100.bandwidth


@pytest.mark.parametrize("is_between", [False, True])
def test_on_a_cpu_gathers_stay_in_the_step(is_between: bool) -> None:
    machine = machine_of("cpu", is_between_machines=(is_between, is_between))
    for side in (256, 512, 2048):
        found = _estimate(_plan(64, side, side, 4).program, machine)
        assert found is not None
        assert not found.pays


def test_the_sentence_says_what_is_done_and_what_it_takes() -> None:
    seconds = {"in_step_seconds": 12.345e-3, "check_seconds": 6e-3}
    in_step = EarlyEstimate(in_backward_seconds=14e-3, **seconds)
    assert in_step.to_text().startswith("gathers start in the step; predicted: 12.35 ms")
    assert "14.00 ms if they start during backward, of which checking what was sent takes 6.00 ms" in in_step.to_text()
    assert EarlyEstimate(in_backward_seconds=11e-3, **seconds).to_text().startswith("gathers start during backward")
