"""Whether replicas divide the work on a matrix or repeat it."""

from __future__ import annotations

from lightning_muon.schedule.cost import PRESETS

_H100 = PRESETS["h100"]
# FLOP/s of Newton-Schulz over bytes/s between two replicas, per rank. CPU: measured on two cores with AVX-512 BF16 and
# gloo over loopback (benchmarks/plan_accuracy.py prints both).
_FLOPS_PER_BYTE = {"cuda": _H100.flops_per_second / _H100.bandwidth[-1], "cpu": 400.0}


def sharing_pays(
    flops: int, wire_bytes: int, *, device_type: str, num_matrices: int, num_replicas: int, replica_ranks: int
) -> bool:
    """Whether one owner for all R replicas beats one in each of them, if all N matrices are like this one.

    Repeating, a rank computes ``m = max(1, N / S)`` matrices, with S ranks in a replica. Sharing, it computes
    ``n = max(1, N / (R S))``, and sends each to R - 1 replicas: with speed F and bandwidth B sharing pays if
    ``(m - n) flops / F > n (R - 1) wire_bytes / B``. For N of R S or more that is ``flops / wire_bytes > F / B``. The
    traffic can hide behind arithmetic, so this is the careful choice.

    Args:
        flops: Of Newton-Schulz for the matrix.
        wire_bytes: Of the whole matrix in the wire dtype.
        device_type: ``"cuda"`` or ``"cpu"``; another one counts as CUDA.
        num_matrices: N.
        num_replicas: R.
        replica_ranks: S.
    """
    shared = max(1.0, num_matrices / (num_replicas * replica_ranks))
    repeated = max(1.0, num_matrices / replica_ranks)
    seconds_saved = (repeated - shared) * flops / _FLOPS_PER_BYTE.get(device_type, _FLOPS_PER_BYTE["cuda"])
    return seconds_saved > shared * (num_replicas - 1) * wire_bytes
