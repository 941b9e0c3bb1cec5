"""Ranks that do the same, so that the timeline of thousands of ranks needs only one of each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_muon.schedule.program import Program
from lightning_muon.schedule.simulate import Timeline


@dataclass(frozen=True, kw_only=True)
class Crowd:
    """The ranks behind a timeline that has only one of each kind.

    Attributes:
        sizes: Rank in the timeline -> number of ranks like it, itself among them.
        loads: Load of every rank, in any unit.
    """

    sizes: Mapping[int, int]
    loads: Sequence[float]

    def idle(self, timeline: Timeline) -> float:
        """Mean over all ranks of the idle share of the compute lane."""
        total = sum(self.sizes.values())
        return sum(size * timeline.ranks[rank].idle for rank, size in self.sizes.items()) / total if total else 0.0

    def hidden(self, timeline: Timeline) -> float:
        """Share of all ranks' transfer seconds that run behind arithmetic."""
        each = [(size, timeline.ranks[rank]) for rank, size in self.sizes.items()]
        total = sum(size * summary.transfer_seconds for size, summary in each)
        exposed = sum(size * summary.exposed_seconds for size, summary in each)
        return 1 - exposed / total if total else 1.0


def merge_equal_ranks(program: Program) -> tuple[Program, dict[int, int]]:
    """Keep one rank of those that do the same all the time.

    Communications of all ranks become communications of those that are left. As equal ranks run at equal times, the
    timeline stays what it was.

    Returns:
        The smaller program, and for each rank in it how many ranks are like it, itself among them.
    """
    first_like: dict[tuple[tuple[object, ...], ...], int] = {}
    sizes: dict[int, int] = {}
    for rank, ops in program.items():
        # Groups are compared by identity: those of thousands of ranks are too long, and ops of one program share them.
        pattern = tuple(
            (op.kind, op.key, op.cost, op.lane, op.deps, op.bytes, op.axis_bytes, op.memory, id(op.group)) for op in ops
        )
        kept = first_like.setdefault(pattern, rank)
        sizes[kept] = sizes.get(kept, 0) + 1
    if len(sizes) == len(program):
        return program, sizes
    groups: dict[int, tuple[int, ...]] = {}
    merged: Program = {}
    for rank in sizes:
        merged[rank] = []
        for op in program[rank]:
            if id(op.group) not in groups:
                groups[id(op.group)] = tuple(member for member in op.group if member in sizes)
            merged[rank].append(replace(op, group=groups[id(op.group)]))
    return merged, sizes
