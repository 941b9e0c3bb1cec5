"""Seconds of an op, reading a cost model, and what pays on a machine."""

from dataclasses import replace
from typing import Any

import pytest

from lightning_muon.schedule.assign import sharing_pays
from lightning_muon.schedule.cost import PRESETS, CostModel
from lightning_muon.schedule.program import TRANSFER, Op

H100 = PRESETS["h100"]
# The H100 preset: 0.6 * 989 TFLOP/s over 0.8 * 50 GB/s.
CUDA_FLOPS_PER_BYTE = 0.6 * 989e12 / (0.8 * 50e9)


@pytest.mark.parametrize(
    ("least", "device_type", "num_matrices", "num_replicas"),
    [
        # Many matrices are shared if arithmetic costs more: 15 FLOPs for each byte and row.
        (400 / 15, "cpu", 10_000, 2),
        (CUDA_FLOPS_PER_BYTE / 15, "cuda", 10_000, 2),
        (CUDA_FLOPS_PER_BYTE / 15, "xpu", 10_000, 64),
        # 160 matrices on 64 x 8: repeated 20 per rank, shared 1, so 63 messages have to be paid by 19 matrices.
        (CUDA_FLOPS_PER_BYTE * 63 / 19 / 15, "cuda", 160, 64),
    ],
)
def test_sharing_pays_from_a_size_of_matrices_on(
    least: float, device_type: str, num_matrices: int, num_replicas: int
) -> None:
    def pays(side: int, num_matrices: int) -> bool:
        """For square matrices, five Newton-Schulz steps and a bfloat16 wire."""
        return sharing_pays(
            30 * side**3,
            2 * side * side,
            device_type=device_type,
            num_matrices=num_matrices,
            num_replicas=num_replicas,
            replica_ranks=8,
        )

    assert pays(int(least) + 1, num_matrices)
    assert not pays(int(least) - 1, num_matrices)
    # What no rank repeats is not worth it.
    assert not pays(8192, 8)


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
