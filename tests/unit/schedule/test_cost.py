"""Seconds of an op, and reading a cost model."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from lightning_muon.schedule.cost import PRESETS, CostModel
from lightning_muon.schedule.program import TRANSFER, Op

MACHINE = CostModel(
    flops_per_second=100.0,
    memory_bytes_per_second=10.0,
    op_seconds=0.5,
    bandwidth=(4.0, 2.0),
    latency_seconds=(0.25, 1.0),
)


def _one_link(bandwidth: float, *latency_seconds: float) -> CostModel:
    return CostModel(
        flops_per_second=1.0,
        memory_bytes_per_second=1.0,
        bandwidth=(bandwidth,),
        latency_seconds=latency_seconds or (0.0,),
    )


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
        (_one_link(2.0), {"bytes": 8, "axis_bytes": (2, 8)}, 4),
        (_one_link(1.0), {"bytes": 2, "axis_bytes": (1, 1)}, 2),
        (_one_link(1.0), {"bytes": 1, "axis_bytes": (1, 1)}, 1),
        (replace(_one_link(1.0), bandwidth=(1.0, 1.0)), {"bytes": 2, "axis_bytes": (1, 1)}, 1),
        (replace(_one_link(1.0), bandwidth=(8.0, 1.0)), {"bytes": 13, "axis_bytes": (8, 2, 3)}, 5),
        # A shared link has the latency of its slowest axis that carries any.
        (_one_link(2.0, 0.25, 1.0), {"bytes": 8, "axis_bytes": (6, 2)}, 1 + 4),
        (_one_link(2.0, 0.25, 1.0), {"bytes": 8, "axis_bytes": (8, 0)}, 0.25 + 4),
    ],
)
def test_links_work_side_by_side(machine: CostModel, sizes: dict[str, Any], seconds: float) -> None:
    assert machine.seconds(Op(kind="gather", key="0", rank=0, lane=TRANSFER, **sizes)) == seconds


def test_a_cost_model_survives_json() -> None:
    for machine in (MACHINE, *PRESETS.values()):
        assert CostModel.from_dict(json.loads(json.dumps(asdict(machine)))) == machine
    short = {"flops_per_second": 1, "memory_bytes_per_second": 2, "bandwidth": 3, "latency_seconds": 0.5}
    found = CostModel.from_dict(short)
    assert (found.bandwidth, found.latency_seconds) == ((3,), (0.5,))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bandwith": [1]}, "CostModel: there is no option 'bandwith'; did you mean 'bandwidth'"),
        ({"flops_per_second": 0}, "flops_per_second must be finite and above 0, got 0"),
        ({"bandwidth": [1.0, -2.0]}, r"bandwidth must be finite and above 0, got \(1.0, -2.0\)"),
        ({"bandwidth": []}, r"bandwidth must be finite and above 0, got \(\)"),
        ({"latency_seconds": -1}, r"latency_seconds must be finite and at least 0, got \(-1,\)"),
        ({"flops_per_second": float("inf")}, "flops_per_second must be finite and above 0, got inf"),
        ({"op_seconds": float("nan")}, "op_seconds must be finite and at least 0, got nan"),
        ({"bandwidth": "fast"}, r"bandwidth must be finite and above 0, got \('fast',\)"),
    ],
)
def test_a_wrong_entry_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        CostModel.from_dict(asdict(MACHINE) | change)
