"""Whether replicas divide the work on a matrix or repeat it."""

from __future__ import annotations

# FLOP/s of Newton-Schulz over bytes/s between two replicas, per rank. CUDA: 500 TFLOP/s in bfloat16 and a 400 Gbit/s
# network card for each GPU, as in a DGX H100. CPU: measured on two cores with AVX-512 BF16 and gloo over loopback
# (benchmarks/plan_accuracy.py prints both).
_FLOPS_PER_BYTE = {"cuda": 10_000, "cpu": 400}


def sharing_pays(flops: int, wire_bytes: int, *, device_type: str) -> bool:
    """Whether one owner for all R replicas beats one in each of them.

    With S ranks in a replica, speed F and bandwidth B, sharing saves ``(1 - 1/R) flops / (S F)`` seconds of arithmetic
    and costs ``(1 - 1/R) wire_bytes / (S B)`` seconds of traffic between replicas, so it pays if
    ``flops / wire_bytes > F / B``, whatever R and S are. The traffic can hide behind arithmetic, so this is the careful
    choice.

    Args:
        flops: Of Newton-Schulz for the matrix.
        wire_bytes: Of the whole matrix in the wire dtype.
        device_type: ``"cuda"`` or ``"cpu"``; another one counts as CUDA.
    """
    return flops > wire_bytes * _FLOPS_PER_BYTE.get(device_type, _FLOPS_PER_BYTE["cuda"])
