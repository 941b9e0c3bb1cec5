"""Seconds of an op on a machine."""

from dataclasses import replace
from typing import Any

import pytest

from lightning_muon.schedule.program import TRANSFER, Op
from lightning_muon.schedule.simulate import CostModel

MACHINE = CostModel(
    flops_per_second=100.0,
    memory_bytes_per_second=10.0,
    op_seconds=0.5,
    bandwidth=(4.0, 2.0),
    latency_seconds=(0.25, 1.0),
)


def _links(*bandwidth: float, latencies: tuple[float, ...] = (0.0,)) -> CostModel:
    return replace(MACHINE, bandwidth=bandwidth, latency_seconds=latencies)


def test_compute_takes_its_flops_memory_traffic_and_a_launch() -> None:
    assert MACHINE.seconds(Op(kind="newton_schulz", key="0", rank=0, cost=200, bytes=30)) == 2 + 3 + 0.5
    assert MACHINE.seconds(Op(kind="newton_schulz", key="0", rank=0)) == 0


@pytest.mark.parametrize(
    ("machine", "sizes", "seconds"),
    [
        # The slowest link bounds a transfer.
        (MACHINE, {"bytes": 8}, 0.25 + 2),
        (MACHINE, {"bytes": 10, "axis_bytes": (8, 2)}, max(0.25 + 2, 1 + 1)),
        (MACHINE, {"bytes": 14, "axis_bytes": (8, 6)}, 1 + 3),
        (MACHINE, {"bytes": 6, "axis_bytes": (0, 6)}, 1 + 3),
        # A collective without bytes takes a latency, and a transfer alone takes none.
        (MACHINE, {"axis_bytes": (0, 0), "group": (0, 1)}, 0.25),
        (MACHINE, {"group": (0,)}, 0),
        # Axes share a single link; what goes out and what comes in go over it at the same time.
        (_links(2.0), {"bytes": 8, "axis_bytes": (2, 8)}, 4),
        (_links(1.0), {"bytes": 2, "axis_bytes": (1, 1)}, 2),
        (_links(1.0, 1.0), {"bytes": 2, "axis_bytes": (1, 1)}, 1),
        (_links(8.0, 1.0), {"bytes": 13, "axis_bytes": (8, 2, 3)}, 5),
        # A shared link has the latency of its slowest axis that carries any.
        (_links(2.0, latencies=(0.25, 1.0)), {"bytes": 8, "axis_bytes": (6, 2)}, 1 + 4),
        (_links(2.0, latencies=(0.25, 1.0)), {"bytes": 8, "axis_bytes": (8, 0)}, 0.25 + 4),
    ],
)
def test_links_work_side_by_side(machine: CostModel, sizes: dict[str, Any], seconds: float) -> None:
    assert machine.seconds(Op(kind="gather", key="0", rank=0, lane=TRANSFER, **sizes)) == seconds
