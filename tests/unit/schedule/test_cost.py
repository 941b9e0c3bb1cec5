"""Seconds of an op, and reading a cost model."""

from __future__ import annotations

import json
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


def _transfer(**sizes: Any) -> Op:
    return Op(kind="gather", key="0", rank=0, lane=TRANSFER, **sizes)


def test_compute_takes_its_flops_and_its_memory_traffic_and_a_launch() -> None:
    assert MACHINE.seconds(Op(kind="newton_schulz", key="0", rank=0, cost=200, bytes=30)) == 2 + 3 + 0.5
    assert MACHINE.seconds(Op(kind="newton_schulz", key="0", rank=0)) == 0


def test_the_slowest_link_bounds_a_transfer() -> None:
    assert MACHINE.seconds(_transfer(bytes=8)) == 0.25 + 2
    assert MACHINE.seconds(_transfer(bytes=10, axis_bytes=(8, 2))) == max(0.25 + 2, 1 + 1)
    assert MACHINE.seconds(_transfer(bytes=14, axis_bytes=(8, 6))) == 1 + 3
    assert MACHINE.seconds(_transfer(bytes=6, axis_bytes=(0, 6))) == 1 + 3


def test_a_collective_without_bytes_takes_a_latency_and_a_transfer_alone_takes_none() -> None:
    assert MACHINE.seconds(_transfer(axis_bytes=(0, 0), group=(0, 1))) == 0.25
    assert MACHINE.seconds(_transfer(group=(0,))) == 0


def test_a_machine_with_one_kind_of_link_uses_it_for_all_axes() -> None:
    machine = CostModel(flops_per_second=1.0, memory_bytes_per_second=1.0, bandwidth=(2.0,))
    assert machine.seconds(_transfer(bytes=8, axis_bytes=(2, 8))) == 4


def test_axes_that_share_a_link_take_the_time_of_their_bytes_together() -> None:
    one_link = CostModel(flops_per_second=1.0, memory_bytes_per_second=1.0, bandwidth=(1e9,))
    both = _transfer(bytes=2 * 10**9, axis_bytes=(10**9, 10**9))
    assert one_link.seconds(both) == 2
    # One GB comes from within and another one goes out: a link does that at the same time.
    assert one_link.seconds(_transfer(bytes=10**9, axis_bytes=(10**9, 10**9))) == 1
    assert CostModel.from_dict(one_link.to_dict() | {"bandwidth": [1e9, 1e9]}).seconds(both) == 1
    two_links = CostModel(flops_per_second=1.0, memory_bytes_per_second=1.0, bandwidth=(8.0, 1.0))
    assert two_links.seconds(_transfer(bytes=13, axis_bytes=(8, 2, 3))) == 5


def test_a_shared_link_has_the_latency_of_its_slowest_axis_that_carries_any() -> None:
    machine = CostModel(
        flops_per_second=1.0, memory_bytes_per_second=1.0, bandwidth=(2.0,), latency_seconds=(0.25, 1.0)
    )
    assert machine.seconds(_transfer(bytes=8, axis_bytes=(6, 2))) == 1 + 4
    assert machine.seconds(_transfer(bytes=8, axis_bytes=(8, 0))) == 0.25 + 4


def test_a_cost_model_survives_json() -> None:
    for machine in (MACHINE, *PRESETS.values()):
        assert CostModel.from_json(json.dumps(machine.to_dict())) == machine
    short = {"flops_per_second": 1, "memory_bytes_per_second": 2, "bandwidth": 3, "latency_seconds": 0.5}
    assert CostModel.from_dict(short).bandwidth == (3,)
    assert CostModel.from_dict(short).latency_seconds == (0.5,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bandwith": [1]}, "'bandwith' is no key of a cost model; did you mean 'bandwidth'"),
        ({"zzz": 1}, "'zzz' is no key of a cost model; the keys are"),
        ({"flops_per_second": 0}, "flops_per_second must be finite and above 0, got 0"),
        ({"bandwidth": [1.0, -2.0]}, r"bandwidth must be finite and above 0, got \(1.0, -2.0\)"),
        ({"bandwidth": []}, "bandwidth must have an entry for at least one kind of link"),
        ({"latency_seconds": -1}, r"latency_seconds must be finite and at least 0, got \(-1,\)"),
        ({"flops_per_second": float("inf")}, "flops_per_second must be finite and above 0, got inf"),
        ({"op_seconds": float("nan")}, "op_seconds must be finite and at least 0, got nan"),
    ],
)
def test_a_wrong_entry_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostModel.from_dict(MACHINE.to_dict() | change)


def test_a_missing_entry_and_a_wrong_type_are_named() -> None:
    with pytest.raises(ValueError, match="the cost model has no 'bandwidth'"):
        CostModel.from_dict({"flops_per_second": 1.0, "memory_bytes_per_second": 1.0})
    with pytest.raises(TypeError, match="bandwidth must be a number or a tuple of numbers, got \\('fast',\\)"):
        CostModel.from_dict(MACHINE.to_dict() | {"bandwidth": "fast"})
    with pytest.raises(TypeError, match="a cost model is a JSON object, got list"):
        CostModel.from_json("[1]")
