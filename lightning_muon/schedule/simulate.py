"""Simulates when every op of a program begins and ends, on a machine described by a cost model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple, Protocol

from lightning_muon.schedule.program import COMPUTE, Op, Program, in_order


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
