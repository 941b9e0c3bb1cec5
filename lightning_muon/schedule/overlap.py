"""Whether gathers that start during backward save more time than they cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_muon.schedule.cost import PRESETS, CostModel
from lightning_muon.schedule.kinds import GATHER, MOMENTUM, NEWTON_SCHULZ, SCATTER, UPDATE
from lightning_muon.schedule.program import Op, Program

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


def estimate_early(program: Program, machine: CostModel) -> EarlyEstimate | None:
    """What a step takes with and without early gathers; ``None`` if nothing is gathered.

    With k chunks, and g, n, s the seconds of the gather, the arithmetic of the busiest rank, and the scatter of an
    average chunk, a step takes

    - ``g + n + s + (k - 1) max(n, g + s)`` if gathers start in it: they share a lane with the scatters;
    - ``max(k n + s, max(g, n) + k s, g + n + s)`` and the check, if they start during backward. The last chunk has its
      gradients when backward ends, so its gather can hide behind the arithmetic of the others only.

    Backward is taken to be long enough for all gathers, and to leave the links free for them.

    Args:
        program: Canonical: for each rank momentum, gather, newton_schulz, scatter, update of chunk after chunk.
        machine: Rates.
    """
    kinds = (MOMENTUM, NEWTON_SCHULZ, UPDATE)
    busiest, check = dict.fromkeys(kinds, 0.0), 0.0
    # A communication takes as long as its slowest member.
    transfers: dict[str, dict[str, float]] = {GATHER: {}, SCATTER: {}}
    for ops in program.values():
        of_rank = dict.fromkeys(kinds, 0.0)
        check_of_rank = 0.0
        gathered = {op.key for op in ops if op.kind == GATHER}
        for op in ops:
            seconds = machine.seconds(op)
            if op.kind in transfers:
                slowest = transfers[op.kind]
                slowest[op.key] = max(seconds, slowest.get(op.key, 0.0))
            elif op.kind in of_rank:
                of_rank[op.kind] += seconds
            if op.kind == MOMENTUM and op.key in gathered:
                check_of_rank += _check_seconds(op, machine)
        check = max(check, check_of_rank)
        busiest = {kind: max(busiest[kind], seconds) for kind, seconds in of_rank.items()}
    num_chunks = len(transfers[GATHER])
    if not num_chunks:
        return None
    gather, scatter = (sum(transfers[kind].values()) / num_chunks for kind in (GATHER, SCATTER))
    rest = (busiest[NEWTON_SCHULZ] + busiest[UPDATE]) / num_chunks
    whole = rest + busiest[MOMENTUM] / num_chunks
    return EarlyEstimate(
        in_step_seconds=gather + whole + scatter + (num_chunks - 1) * max(whole, gather + scatter),
        in_backward_seconds=check
        + max(num_chunks * rest + scatter, max(gather, rest) + num_chunks * scatter, gather + rest + scatter),
        check_seconds=check,
    )


def _check_seconds(momentum: Op, machine: CostModel) -> float:
    """Of one chunk; the handful of kernels for each matrix counts as one op."""
    return _BYTES_OF_CHECK * momentum.bytes / machine.memory_bytes_per_second + len(momentum.items) * machine.op_seconds
