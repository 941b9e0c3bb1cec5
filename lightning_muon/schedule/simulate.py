"""Simulates when every op of a program begins and ends, on a machine that a cost model describes in five numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, cast

from lightning_muon.config import takes_options
from lightning_muon.schedule.program import COMPUTE, TRANSFER, Op, Program, in_order


@takes_options()
@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Rates of one rank's machine. ``bandwidth`` and ``latency_seconds`` have an entry per kind of link, fastest first.

    Axes beyond the last bandwidth share the link of the last one: on a machine with one entry, all bytes of an op go
    over one link.

    Example:
        >>> machine = CostModel(flops_per_second=1e12, memory_bytes_per_second=1e11, bandwidth=(1e9,))
        >>> machine.seconds(Op(kind="newton_schulz", key="0", rank=0, cost=2 * 10**12, bytes=10**10))
        2.1
    """

    flops_per_second: float  # Rate of large matrix products.
    memory_bytes_per_second: float  # Rate of elementwise work.
    bandwidth: tuple[float, ...]  # Bytes per second that a rank can send, and at the same time receive.
    op_seconds: float = 0.0  # Time that every compute op takes in addition, for example to launch its kernels.
    latency_seconds: tuple[float, ...] = (0.0,)  # Time that every transfer takes in addition.

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            values = cast("tuple[Any, ...]", value if isinstance(value, tuple) else (value,))
            may_be_zero = name.endswith("seconds")
            is_right = [isinstance(each, int | float) and 0 <= each < math.inf for each in values]
            if not values or not all(is_right) or not (may_be_zero or all(values)):
                raise ValueError(f"{name} must be finite and {'at least' if may_be_zero else 'above'} 0, got {value!r}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make a model from the dict of :func:`dataclasses.asdict` or of a JSON file; a number means a list of one."""
        arguments = {**values}
        for key in {"bandwidth", "latency_seconds"} & set(arguments):
            arguments[key] = tuple(arguments[key]) if isinstance(arguments[key], list | tuple) else (arguments[key],)
        return cls(**arguments)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a JSON file as ``benchmarks/plan_accuracy.py`` writes it; a ``ValueError`` says what is wrong."""
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error

    def transfer_seconds(self, *axis_bytes: float) -> float:
        """Seconds to send so many bytes over each kind of link at the same time."""
        sizes = tuple(map(round, axis_bytes))
        return self.seconds(Op(kind="", key="", rank=0, lane=TRANSFER, bytes=sum(sizes), axis_bytes=sizes))

    def seconds(self, op: Op) -> float:
        """Seconds that the op takes on its rank once it has begun.

        Links work side by side, and the bytes of axes that share a link add up. A collective in which this rank moves
        nothing takes the latency of the fastest link.
        """
        if op.lane == COMPUTE:
            if not op.cost and not op.bytes:
                return 0.0
            return op.cost / self.flops_per_second + op.bytes / self.memory_bytes_per_second + self.op_seconds
        by_axis = op.axis_bytes or (op.bytes,)
        if not any(by_axis):
            return self.latency_seconds[0] if len(op.group) > 1 else 0.0
        slowest = len(self.latency_seconds) - 1
        waits = [self.latency_seconds[min(axis, slowest)] if size else 0.0 for axis, size in enumerate(by_axis)]
        last = min(len(self.bandwidth), len(by_axis)) - 1
        # Bytes that are sent and received at the same time count once, in `op.bytes` but not in the sum over all axes.
        shared = sum(by_axis[last:]) if last else op.bytes or sum(by_axis)
        links = zip((*waits[:last], max(waits[last:])), (*by_axis[:last], shared), self.bandwidth, strict=False)
        return max(wait + size / bandwidth for wait, size, bandwidth in links if size)


PRESETS: dict[str, CostModel] = {
    # Round numbers for comparing schedules: about half the peak of an A100 (312 TFLOP/s bfloat16, 2.0 TB/s memory:
    # NVIDIA A100 80GB data sheet) and one link of 40 GB/s per GPU. Latencies and launches are assumed.
    "reference": CostModel(
        flops_per_second=150e12,
        memory_bytes_per_second=1.5e12,
        bandwidth=(40e9,),
        op_seconds=10e-6,
        latency_seconds=(20e-6,),
    ),
    # DGX H100: 989 TFLOP/s bfloat16, 3.35 TB/s, NVLink 450 GB/s and InfiniBand 50 GB/s per GPU and direction (NVIDIA
    # H100 SXM and DGX H100 data sheets). Assumed: 60 % of the FLOP/s, 80 % of all bandwidths, latencies, launches.
    "h100": CostModel(
        flops_per_second=0.6 * 989e12,
        memory_bytes_per_second=0.8 * 3.35e12,
        bandwidth=(0.8 * 450e9, 0.8 * 50e9),
        op_seconds=10e-6,
        latency_seconds=(20e-6, 40e-6),
    ),
    # ``benchmarks/plan_accuracy.py`` on two cores with AVX-512 BF16 (memory, loopback), with the FLOP/s that
    # exchange.py has for this loopback; the 10 Gbit/s between machines are assumed.
    "cpu": CostModel(
        flops_per_second=400 * 1.4e9,
        memory_bytes_per_second=12e9,
        bandwidth=(1.4e9, 1.25e9),
        op_seconds=0.2e-3,
        latency_seconds=(0.2e-3,),
    ),
}
"""Machines by name. Data sheets and assumptions; measure your own."""


class Clock(Protocol):
    """Gives the time of an op: a :class:`~.cost.CostModel`, or measured seconds."""

    def seconds(self, op: Op) -> float:
        """Seconds that an op takes once it has begun."""
        ...


class Span(NamedTuple):
    """An op and when it ran, in seconds from the start of the program."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """How one rank spent the time of the program."""

    compute_seconds: float  # Time in which the compute lane was busy.
    transfer_seconds: float  # Time in which a transfer was running; waiting for another rank does not count.
    exposed_seconds: float  # Time in which a transfer was running and the compute lane was idle.
    # Most bytes of results at one time; a result lives from the start of its op to the end of its last user.
    peak_bytes: int


@dataclass(frozen=True)
class Timeline:
    """When everything ran: for each rank its ops in program order."""

    spans: dict[int, list[Span]]

    @cached_property
    def makespan(self) -> float:
        """Seconds until the last op of all ranks has ended."""
        return max((span.end for spans in self.spans.values() for span in spans), default=0.0)

    @cached_property
    def ranks(self) -> dict[int, RankSummary]:
        """Summary of each rank's time."""
        return {rank: _summary(spans, self.makespan) for rank, spans in self.spans.items()}

    @property
    def idle(self) -> float:
        """Mean over the ranks of the idle share of the compute lane."""
        busy = sum(each.compute_seconds for each in self.ranks.values())
        return max(0.0, 1 - busy / (self.makespan * len(self.ranks))) if self.makespan else 0.0

    @property
    def bubble(self) -> float:
        """Idle share of the rank with the longest time from the begin of its first compute op to the end of its last.

        What papers on pipelines report: ranks that begin later, and end later by as much, have none.
        """
        longest, bubble = 0.0, 0.0
        for rank, spans in self.spans.items():
            compute = [span for span in spans if span.op.lane == COMPUTE]
            seconds = compute[-1].end - compute[0].start if compute else 0.0
            if seconds > longest:
                longest, bubble = seconds, 1 - self.ranks[rank].compute_seconds / seconds
        return bubble

    @property
    def hidden(self) -> float:
        """Share of all ranks' transfer seconds that ran behind arithmetic."""
        total = sum(each.transfer_seconds for each in self.ranks.values())
        return 1 - sum(each.exposed_seconds for each in self.ranks.values()) / total if total else 1.0

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the rank that needs most."""
        return max((each.peak_bytes for each in self.ranks.values()), default=0)


def simulate(program: Program, cost_model: Clock) -> Timeline:
    """Simulate the program; a communication begins when all of its ranks have reached it, and takes its slowest time.

    Raises a ``ValueError`` if ops wait for each other.
    """
    spans: dict[tuple[int, str], Span] = {}
    free: dict[tuple[int, str], float] = {}  # When each lane of each rank has ended its last op.
    for ops in in_order(program):
        start = max(free.get((op.rank, op.lane), 0.0) for op in ops)
        start = max([start, *(spans[op.rank, name].end for op in ops for name in op.deps)])
        end = start + max(map(cost_model.seconds, ops))
        for op in ops:
            spans[op.rank, op.name] = Span(op, start, end)
            free[op.rank, op.lane] = end
    return Timeline({rank: [spans[op.rank, op.name] for op in ops] for rank, ops in program.items()})


def _summary(spans: Sequence[Span], makespan: float) -> RankSummary:
    compute_seconds = _covered(span for span in spans if span.op.lane == COMPUTE)
    transfer_seconds = _covered(span for span in spans if span.op.lane != COMPUTE)
    return RankSummary(
        compute_seconds=compute_seconds,
        transfer_seconds=transfer_seconds,
        # Clamped, because rounding may give impossible values.
        exposed_seconds=min(max(_covered(spans) - compute_seconds, 0.0), transfer_seconds),
        peak_bytes=_peak_bytes(spans, makespan),
    )


def _peak_bytes(spans: Sequence[Span], makespan: float) -> int:
    last_use: dict[str, float] = {}
    for span in spans:
        for name in span.op.deps:
            last_use[name] = max(last_use.get(name, 0.0), span.end)
    changes: list[tuple[float, int]] = []
    for op, begin, _ in spans:
        if op.memory:
            changes += [(begin, op.memory), (last_use.get(op.name, makespan), -op.memory)]
    # Memory that is freed at a time is free for ops that begin then: negative numbers sort first.
    alive, most = 0, 0
    for _, change in sorted(changes):
        alive += change
        most = max(most, alive)
    return most


def _covered(spans: Iterable[Span]) -> float:
    """Seconds in which any of the spans ran."""
    total, covered_until = 0.0, 0.0
    for _, start, end in sorted(spans, key=itemgetter(1)):
        total += max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return total
