"""A cost model that is fitted to spans finds the machine behind them."""

from dataclasses import replace

import pytest

from benchmarks.plan_accuracy import fit_compute, fit_line, fit_steps
from benchmarks.timelines import Recording
from lightning_muon.schedule.cost import CostModel
from lightning_muon.schedule.program import Op, OpKind
from lightning_muon.schedule.simulate import simulate

MACHINE = CostModel(flops_per_second=2e9, memory_bytes_per_second=1e9, bandwidth=(1e8,), op_seconds=1e-4)


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(1.0, 5.0), (3.0, 9.0), (2.0, 7.0)], (2.0, 3.0)),
        # Without a sensible line there is no constant, and the slope is the sum of y over the sum of x.
        ([(2.0, 6.0), (2.0, 8.0)], (3.5, 0.0)),
        ([(1.0, 9.0), (3.0, 5.0)], (3.5, 0.0)),
    ],
)
def test_a_line_is_found(points: list[tuple[float, float]], expected: tuple[float, float]) -> None:
    assert fit_line(points) == pytest.approx(expected)


def test_rates_are_found_again() -> None:
    ops = [
        Op(kind=OpKind.MOMENTUM, key="0", rank=0, bytes=10**8),
        Op(kind=OpKind.NEWTON_SCHULZ, key="0", rank=0, cost=10**9, bytes=10**6),
        Op(kind=OpKind.UPDATE, key="0", rank=0, bytes=3 * 10**7),
    ]
    timeline = simulate({0: ops}, MACHINE)
    expected = {"flops_per_second": 2e9, "memory_bytes_per_second": 1e9, "op_seconds": 1e-4}
    assert fit_compute(timeline.spans[0]) == pytest.approx(expected, rel=1e-6)
    recording = Recording(timeline=timeline, program={0: ops}, matrices={0: {}})
    for wrong in (0.5, 3.0):
        found = fit_steps(replace(MACHINE, flops_per_second=wrong * 2e9), [recording], device_type="cpu")
        assert found.flops_per_second == pytest.approx(2e9, rel=1e-6)
