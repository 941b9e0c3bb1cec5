"""Upper bound of the bytes of results that are alive at one time, without knowing how long ops take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_muon.schedule.program import Op, Program


@dataclass(frozen=True)
class Peak:
    """Most bytes of a rank, and the op at whose start they may be reached."""

    bytes: int
    rank: int
    op: str


def peak_memory(program: Program) -> Peak:
    """Upper bound, on the rank that needs most, of the bytes of results that are alive at one time.

    A result lives from the start of its op to the end of its last user (to the end of the program without one). It
    counts at the start of another op unless it must come later, or all of its users must have ended before. Lanes run
    in list order. No timing can bring more together, so a simulation never shows more than this.
    """
    with_result = {op.name for ops in program.values() for op in ops if op.memory}
    # Ranks run the same ops with different sizes, so what may be alive together is found once for all of them.
    known: dict[object, list[tuple[int, list[int]]]] = {}
    most = Peak(0, 0, "")
    for rank, ops in program.items():
        structure = tuple((op.name, op.lane, op.deps) for op in ops)
        if structure not in known:
            known[structure] = list(_alive_together(ops, with_result))
        for index, alive in known[structure]:
            total = sum(ops[other].memory for other in alive)
            if total > most.bytes:
                most = Peak(total, rank, ops[index].name)
    return most


def _alive_together(ops: Sequence[Op], with_result: set[str]) -> Iterator[tuple[int, list[int]]]:
    """For each op with a result: the ops whose results may be alive when it starts, itself among them."""
    ancestors, descendants, users = _relations(ops)
    results = sum(1 << index for index, op in enumerate(ops) if op.name in with_result)
    not_dead = {op.lane: results for op in ops}
    for index in _bits(results):
        lane = ops[index].lane
        alive: list[int] = []
        for other in _bits(not_dead[lane] & ~descendants[index]):
            if users[other] and not users[other] & ~ancestors[index]:
                # Dead for the later ops of this lane too: they have the same ancestors and more.
                not_dead[lane] &= ~(1 << other)
            else:
                alive.append(other)
        yield index, alive


def _relations(ops: Sequence[Op]) -> tuple[list[int], list[int], list[int]]:
    """Bit sets of the ops that must end before each op, of those that must start after it, and of its direct users."""
    place = {op.name: index for index, op in enumerate(ops)}
    ancestors, descendants, users = ([0] * len(ops) for _ in range(3))
    before: list[list[int]] = []
    last: dict[str, int] = {}
    for index, op in enumerate(ops):
        used = [place[name] for name in op.deps if name in place]
        for other in used:
            users[other] |= 1 << index
        # Leaving out what is listed later can only raise the bound.
        needs = [other for other in used if other < index]
        if op.lane in last:
            needs.append(last[op.lane])
        last[op.lane] = index
        before.append(needs)
        for other in needs:
            ancestors[index] |= ancestors[other] | 1 << other
    for index in range(len(ops) - 1, -1, -1):
        for other in before[index]:
            descendants[other] |= descendants[index] | 1 << index
    return ancestors, descendants, users


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
