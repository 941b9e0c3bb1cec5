"""Whether gathers that start during backward save more time than they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_muon.schedule.cost import PRESETS, CostModel
from lightning_muon.schedule.program import GATHER, MOMENTUM, NEWTON_SCHULZ, SCATTER, UPDATE, Op

# What a rank has inside of a machine, and between machines. CPU: ``lightning-muon plan --calibrate`` on two cores with
# AVX-512 BF16 (memory, loopback), the FLOP/s that schedule/dedupe.py has for this loopback; 10 Gbit/s are assumed.
_MACHINES = {
    "cuda": PRESETS["h100"],
    "cpu": CostModel(
        flops_per_second=400 * 1.4e9,
        memory_bytes_per_second=12e9,
        bandwidth=(1.4e9, 1.25e9),
        op_seconds=0.2e-3,
        latency_seconds=(0.2e-3,),
    ),
}
# The comparison computes the look-ahead again, rounds it, and reads what was sent: 36 bytes for an element of 2 bytes
# on the wire, 34 for one of 4, where the op that sends it counts 14 and 16 (schedule/communication.py).
_BYTES_OF_CHECK = 2.5


@dataclass(frozen=True, kw_only=True)
class EarlyEstimate:
    """Predicted seconds of a step of one exchange group, after backward and without AdamW.

    Attributes:
        in_step_seconds: All gathers start in the step.
        in_backward_seconds: They start during backward; with the check.
        check_seconds: Of these, finding out whether what was sent is what the step would send.
    """

    in_step_seconds: float
    in_backward_seconds: float
    check_seconds: float

    @property
    def pays(self) -> bool:
        """Whether gathers should start during backward."""
        return self.in_backward_seconds < self.in_step_seconds

    def to_text(self) -> str:
        """One sentence."""
        where = "during backward" if self.pays else "in the step"
        return (
            f"gathers start {where}; predicted: {1e3 * self.in_step_seconds:.2f} ms if they start in the step, "
            f"{1e3 * self.in_backward_seconds:.2f} ms if they start during backward, of which checking what was sent "
            f"takes {1e3 * self.check_seconds:.2f} ms"
        )


def machine_of(device_type: str, *, is_between_machines: tuple[bool, bool]) -> CostModel:
    """The rates that plans are made with, since all ranks must decide alike.

    Args:
        device_type: ``"cuda"`` or ``"cpu"``; another one counts as CUDA.
        is_between_machines: Whether the links inside of a replica lead to other machines, and those between replicas.
    """
    machine = _MACHINES.get(device_type, _MACHINES["cuda"])
    links = [-1 if is_between else 0 for is_between in is_between_machines]
    return replace(
        machine,
        bandwidth=tuple(machine.bandwidth[link] for link in links),
        latency_seconds=tuple(machine.latency_seconds[link] for link in links),
    )


@dataclass(frozen=True, kw_only=True)
class RankSeconds:
    """Predicted seconds of the ops of one rank, without AdamW.

    Attributes:
        gathers: By bucket.
        scatters: By bucket.
        momentum: Of all buckets, as the next two.
        newton_schulz: Or whatever else is computed on whole matrices.
        update: Of the weights.
        check: Finding out whether what was sent early is what the step would send.
    """

    gathers: Mapping[str, float]
    scatters: Mapping[str, float]
    momentum: float
    newton_schulz: float
    update: float
    check: float


def rank_seconds(ops: Sequence[Op], machine: CostModel) -> RankSeconds:
    """How long one rank takes.

    Args:
        ops: Canonical: momentum, gather, newton_schulz, scatter, update of bucket after bucket.
        machine: Rates.
    """
    by_kind: dict[str, dict[str, float]] = {kind: {} for kind in (MOMENTUM, GATHER, NEWTON_SCHULZ, SCATTER, UPDATE)}
    for op in ops:
        if op.kind in by_kind:
            by_kind[op.kind][op.key] = machine.seconds(op)
    gathers = by_kind[GATHER]
    return RankSeconds(
        gathers=gathers,
        scatters=by_kind[SCATTER],
        momentum=sum(by_kind[MOMENTUM].values()),
        newton_schulz=sum(by_kind[NEWTON_SCHULZ].values()),
        update=sum(by_kind[UPDATE].values()),
        check=sum(_check_seconds(op, machine) for op in ops if op.kind == MOMENTUM and op.key in gathers),
    )


def estimate_early(ranks: Sequence[RankSeconds]) -> EarlyEstimate | None:
    """What a step takes with and without early gathers; ``None`` if nothing is gathered.

    With k buckets, and g, n, s the seconds of the gather, the arithmetic of the busiest rank, and the scatter of an
    average bucket, a step takes

    - ``g + n + s + (k - 1) max(n, g + s)`` if gathers start in it: they share a lane with the scatters;
    - ``max(k n + s, max(g, n) + k s, g + n + s)`` and the check, if they start during backward. The last bucket has its
      gradients when backward ends, so its gather can hide behind the arithmetic of the others only.

    Backward is taken to be long enough for all gathers, and to leave the links free for them.

    Args:
        ranks: Of all ranks, since a communication takes as long as its slowest member.
    """
    gathers, scatters = _slowest([each.gathers for each in ranks]), _slowest([each.scatters for each in ranks])
    num_buckets = len(gathers)
    if not num_buckets:
        return None
    gather, scatter = sum(gathers.values()) / num_buckets, sum(scatters.values()) / num_buckets
    check = max(each.check for each in ranks)
    rest = (max(each.newton_schulz for each in ranks) + max(each.update for each in ranks)) / num_buckets
    whole = rest + max(each.momentum for each in ranks) / num_buckets
    return EarlyEstimate(
        in_step_seconds=gather + whole + scatter + (num_buckets - 1) * max(whole, gather + scatter),
        in_backward_seconds=check
        + max(num_buckets * rest + scatter, max(gather, rest) + num_buckets * scatter, gather + rest + scatter),
        check_seconds=check,
    )


def _slowest(of_ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The longest time that any rank takes for each bucket."""
    found: dict[str, float] = {}
    for seconds in of_ranks:
        for key, each in seconds.items():
            found[key] = max(each, found.get(key, 0.0))
    return found


def _check_seconds(momentum: Op, machine: CostModel) -> float:
    """Of one bucket; the handful of kernels for each matrix counts as one op."""
    return _BYTES_OF_CHECK * momentum.bytes / machine.memory_bytes_per_second + len(momentum.items) * machine.op_seconds
