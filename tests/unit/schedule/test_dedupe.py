"""Whether replicas share the work on a matrix."""

from __future__ import annotations

import pytest

from lightning_muon.schedule.dedupe import sharing_pays

# The H100 preset: 0.6 * 989 TFLOP/s over 0.8 * 50 GB/s.
CUDA_FLOPS_PER_BYTE = 0.6 * 989e12 / (0.8 * 50e9)


def _pays(side: int, *, device_type: str, num_matrices: int, num_replicas: int = 2, replica_ranks: int = 8) -> bool:
    """For square matrices, five Newton-Schulz steps and a bfloat16 wire: 15 ``side`` FLOPs for each byte."""
    return sharing_pays(
        30 * side**3,
        2 * side * side,
        device_type=device_type,
        num_matrices=num_matrices,
        num_replicas=num_replicas,
        replica_ranks=replica_ranks,
    )


@pytest.mark.parametrize(("device_type", "flops_per_byte"), [("cpu", 400), ("cuda", CUDA_FLOPS_PER_BYTE)])
@pytest.mark.parametrize("num_replicas", [2, 4, 64])
def test_with_many_matrices_the_balance_of_arithmetic_and_traffic_decides(
    device_type: str, flops_per_byte: float, num_replicas: int
) -> None:
    least = int(flops_per_byte / 15) + 1
    layout = {"num_matrices": 10_000, "num_replicas": num_replicas}
    assert _pays(least, device_type=device_type, **layout)
    assert not _pays(least - 2, device_type=device_type, **layout)


def test_with_fewer_matrices_than_ranks_every_owner_sends_to_all_replicas() -> None:
    # 160 matrices on 64 x 8: repeated 20 per rank, shared 1, so 63 messages have to be paid by 19 matrices.
    least = int(CUDA_FLOPS_PER_BYTE * 63 / 19 / 15) + 1
    assert _pays(least, device_type="cuda", num_matrices=160, num_replicas=64)
    assert not _pays(least - 2, device_type="cuda", num_matrices=160, num_replicas=64)


def test_sharing_what_no_rank_repeats_does_not_pay() -> None:
    assert not _pays(8192, device_type="cuda", num_matrices=8)


def test_an_unknown_device_counts_as_cuda() -> None:
    layout = {"num_matrices": 10_000, "num_replicas": 2}
    assert [_pays(side, device_type="xpu", **layout) for side in (500, 2000)] == [False, True]
