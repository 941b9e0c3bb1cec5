"""When every op of a program begins and ends, on a machine described by a cost model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from lightning_muon.schedule.cost import CostModel
from lightning_muon.schedule.graph import build_graph
from lightning_muon.schedule.program import COMPUTE, Op, Program


class Span(NamedTuple):
    """An op and when it ran, in seconds from the start of the program."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """How one rank spent the time of the program."""

    compute_seconds: float  # The compute lane was busy.
    idle: float  # Share of the makespan in which the compute lane was idle.
    transfer_seconds: float  # A transfer was running; waiting for another rank does not count.
    exposed_seconds: float  # A transfer was running and the compute lane was idle.
    # Most bytes of results at one time; a result lives from the start of its op to the end of its last user.
    peak_bytes: int

    @property
    def hidden(self) -> float:
        """Share of the transfers that ran behind arithmetic; 1 if there were none."""
        return 1 - self.exposed_seconds / self.transfer_seconds if self.transfer_seconds else 1.0


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
        """What became of each rank's time."""
        # Ranks that do the same share one list.
        found = {
            id(spans): _summary(spans, self.makespan) for spans in {id(s): s for s in self.spans.values()}.values()
        }
        return {rank: found[id(spans)] for rank, spans in self.spans.items()}

    def of_all_ranks(self, like: Mapping[int, int]) -> Timeline:
        """The timeline of all ranks, from one of :func:`merge_equal_ranks`."""
        return Timeline({rank: self.spans[kept] for rank, kept in like.items()})

    @property
    def idle(self) -> float:
        """Mean over the ranks of the idle share of the compute lane."""
        return sum(each.idle for each in self.ranks.values()) / len(self.ranks) if self.ranks else 0.0

    @property
    def hidden(self) -> float:
        """Share of all ranks' transfer seconds that ran behind arithmetic."""
        total = sum(each.transfer_seconds for each in self.ranks.values())
        return 1 - sum(each.exposed_seconds for each in self.ranks.values()) / total if total else 1.0

    @property
    def peak_bytes(self) -> int:
        """Of the rank that needs most."""
        return max((each.peak_bytes for each in self.ranks.values()), default=0)


def simulate(program: Program, cost_model: CostModel) -> Timeline:
    """Run the program on paper.

    An op begins when the one before it in its lane and all of its ``deps`` have ended and, for a communication, when
    that holds on all ranks of its group. A communication takes as long as its slowest member. Takes time in the number
    of ops and dependencies.

    Raises:
        DeadlockError: Ops wait for each other; the message names them.
    """
    graph = build_graph(program)
    start, end = [0.0] * len(graph.nodes), [0.0] * len(graph.nodes)
    seconds = [cost_model.seconds(op) for op in graph.ops]
    for index in graph.order():
        node = graph.nodes[index]
        ended = end[index] = start[index] + max(map(seconds.__getitem__, node.ops))
        for later in node.after:
            if start[later] < ended:
                start[later] = ended
    spans: dict[int, list[Span]] = {}
    first = 0
    for rank, ops in program.items():
        nodes = graph.node_of[first : first + len(ops)]
        spans[rank] = [Span(op, start[node], end[node]) for op, node in zip(ops, nodes, strict=True)]
        first += len(ops)
    return Timeline(spans)


def merge_equal_ranks(program: Program) -> tuple[Program, dict[int, int]]:
    """Keep one rank of those that do the same all the time, so that thousands of ranks are simulated quickly.

    Communications of all ranks become communications of those that are left. As equal ranks run at equal times, the
    timeline stays what it was.

    Returns:
        The smaller program, and for each rank the one in it that does the same.
    """
    first_like: dict[tuple[tuple[object, ...], ...], int] = {}
    like: dict[int, int] = {}
    for rank, ops in program.items():
        # Groups are compared by identity: those of thousands of ranks are too long, and ops of one program share them.
        pattern = tuple(
            (op.kind, op.key, op.cost, op.lane, op.deps, op.bytes, op.axis_bytes, op.memory, id(op.group)) for op in ops
        )
        like[rank] = first_like.setdefault(pattern, rank)
    kept = set(like.values())
    members: dict[int, tuple[int, ...]] = {}
    merged: Program = {}
    for rank in sorted(kept):
        merged[rank] = []
        for op in program[rank]:
            if id(op.group) not in members:
                members[id(op.group)] = tuple(member for member in op.group if member in kept)
            merged[rank].append(replace(op, group=members[id(op.group)]))
    return merged, like


def _summary(spans: Sequence[Span], makespan: float) -> RankSummary:
    compute = _union((span.start, span.end) for span in spans if span.op.lane == COMPUTE)
    transfers = _union((span.start, span.end) for span in spans if span.op.lane != COMPUTE)
    compute_seconds, transfer_seconds = _total(compute), _total(transfers)
    return RankSummary(
        compute_seconds=compute_seconds,
        idle=1 - compute_seconds / makespan if makespan else 0.0,
        transfer_seconds=transfer_seconds,
        exposed_seconds=transfer_seconds - _overlap(compute, transfers),
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
    # What is freed at a time is free for what begins then: negative numbers sort first.
    alive, most = 0, 0
    for _, change in sorted(changes):
        alive += change
        most = max(most, alive)
    return most


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same points in disjoint intervals, in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def _total(intervals: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def _overlap(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> float:
    """Seconds that lie in both; each of them disjoint and in order."""
    total, index = 0.0, 0
    for start, end in one:
        while index < len(other) and other[index][1] <= start:
            index += 1
        place = index
        while place < len(other) and other[place][0] < end:
            total += max(0.0, min(end, other[place][1]) - max(start, other[place][0]))
            place += 1
    return total
