"""Estimates what is faster on a given machine: shared owners, gathers during backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_muon.schedule.cost import PRESETS, CostModel
from lightning_muon.schedule.program import STEP_KINDS, Op, OpKind

_H100 = PRESETS["h100"]
# FLOP/s of Newton-Schulz over bytes/s between two replicas, per rank. CPU: measured on two cores with AVX-512 BF16 and
# gloo over loopback (benchmarks/plan_accuracy.py prints both).
_FLOPS_PER_BYTE = {"cuda": _H100.flops_per_second / _H100.bandwidth[-1], "cpu": 400.0}


def sharing_pays(
    flops: int, wire_bytes: int, *, device_type: str, num_matrices: int, num_replicas: int, replica_ranks: int
) -> bool:
    """Whether one owner for all R replicas is faster than one in each, if all N matrices are like this one.

    With S ranks in a replica, a rank computes ``m = max(1, N / S)`` matrices if replicas repeat the work. If they share
    it, it computes ``n = max(1, N / (R S))`` and sends each to R - 1 replicas. With speed F and bandwidth B sharing is
    faster if ``(m - n) flops / F > n (R - 1) wire_bytes / B``. ``wire_bytes`` are those of the whole matrix; unknown
    devices count as CUDA.
    """
    shared = max(1.0, num_matrices / (num_replicas * replica_ranks))
    repeated = max(1.0, num_matrices / replica_ranks)
    seconds_saved = (repeated - shared) * flops / _FLOPS_PER_BYTE.get(device_type, _FLOPS_PER_BYTE["cuda"])
    return seconds_saved > shared * (num_replicas - 1) * wire_bytes


# The comparison computes the look-ahead again, rounds it, and reads what was sent: 36 bytes for an element of 2 bytes
# on the wire, 34 for one of 4, where the op that sends it counts 14 and 16 (schedule/muon.py).
_BYTES_OF_CHECK = 2.5


@dataclass(frozen=True, kw_only=True)
class PrefetchEstimate:
    """Predicted seconds of a step of one exchange group, after backward and without AdamW."""

    in_step_seconds: float  # If all gathers start in the step.
    in_backward_seconds: float  # If they start during backward; includes the check.
    check_seconds: float  # Time of the check whether what was sent is what the step would send.

    @property
    def pays(self) -> bool:
        """Whether gathers should start during backward."""
        return self.in_backward_seconds < self.in_step_seconds

    def to_text(self) -> str:
        """The estimate in one sentence."""
        where = "during backward" if self.pays else "in the step"
        return (
            f"gathers start {where}; predicted: {1e3 * self.in_step_seconds:.2f} ms if they start in the step, "
            f"{1e3 * self.in_backward_seconds:.2f} ms if they start during backward, of which checking what was sent "
            f"takes {1e3 * self.check_seconds:.2f} ms"
        )


def machine_of(device_type: str, *, is_between_machines: tuple[bool, bool]) -> CostModel:
    """The preset for plans, alike on all ranks; ``is_between_machines``: for links within and between replicas."""
    return PRESETS["cpu" if device_type == "cpu" else "h100"].with_links(is_between_machines)


RankSeconds = Mapping[str, Mapping[str, float]]
"""Kind of op, or ``"check"`` -> bucket -> predicted seconds of one rank."""


def rank_seconds(ops: Sequence[Op], machine: CostModel) -> RankSeconds:
    """Seconds of one rank for the ops of its buckets and, as ``"check"``, for the comparison with what was sent."""
    found = {kind: {op.key: machine.seconds(op) for op in ops if op.kind == kind} for kind in STEP_KINDS}
    found[OpKind.CHECK] = {
        op.key: _BYTES_OF_CHECK * op.bytes / machine.memory_bytes_per_second + len(op.items) * machine.op_seconds
        for op in ops
        if op.kind == OpKind.MOMENTUM and op.key in found[OpKind.GATHER]
    }
    return found


def estimate_prefetch(ranks: Sequence[RankSeconds]) -> PrefetchEstimate | None:
    """Estimate a step with and without early gathers, from the seconds of all ranks; ``None`` without gathers.

    With k buckets, and g, n, s the seconds of the gather, the arithmetic of the busiest rank, and the scatter of an
    average bucket, a step takes

    - ``g + n + s + (k - 1) max(n, g + s)`` if gathers start in it: they share a lane with the scatters;
    - ``max(k n + s, max(g, n) + k s, g + n + s)`` and the check, if they start during backward. The last bucket has its
      gradients when backward ends, so its gather can hide behind the arithmetic of the others only.

    Backward is taken to be long enough for all gathers, and to leave the links free for them.
    """
    # In an order that is equal on all ranks, so that all come to the same decision.
    buckets = list(dict.fromkeys(key for rank in ranks for key in rank[OpKind.GATHER]))
    num_buckets = len(buckets)
    if not buckets:
        return None

    def slowest(kind: str) -> float:
        """Mean over the buckets of the seconds on the slowest rank for each."""
        return sum(max(rank[kind].get(key, 0.0) for rank in ranks) for key in buckets) / num_buckets

    def busiest(kind: str) -> float:
        """Sum over all buckets on the rank that takes longest."""
        return max(sum(rank[kind].values()) for rank in ranks)

    gather, scatter, check = slowest(OpKind.GATHER), slowest(OpKind.SCATTER), busiest(OpKind.CHECK)
    rest = (busiest(OpKind.NEWTON_SCHULZ) + busiest(OpKind.UPDATE)) / num_buckets
    whole = rest + busiest(OpKind.MOMENTUM) / num_buckets
    return PrefetchEstimate(
        in_step_seconds=gather + whole + scatter + (num_buckets - 1) * max(whole, gather + scatter),
        in_backward_seconds=check
        + max(num_buckets * rest + scatter, max(gather, rest) + num_buckets * scatter, gather + rest + scatter),
        check_seconds=check,
    )
